"""The store: replace removes what is gone, indexes follow, one scope leaves the others alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pd_operator.core.names import DEPLOYMENT
from pd_operator.core.observed import ChildFact
from pd_operator.kube.store import Store, Stores, owner_of


def fact(name: str, owner: str | None = "chat", *, kind: str = "Service", version: str = "1") -> ChildFact:
    return ChildFact(kind, "ns", name, "uid", labels={DEPLOYMENT: owner} if owner else {}, resource_version=version)


def key(item: ChildFact) -> tuple[str, str, str]:
    return item.kind, item.namespace, item.name


def test_objects_are_found_by_key_and_by_owner() -> None:
    store = Stores().children
    for item in (fact("b"), fact("a"), fact("c", "other"), fact("d", None)):
        assert store.put("s", key(item), item) is None
    assert store.get("Service", "ns", "a") == fact("a")
    assert store.get("Service", "ns", "x") is None
    assert [item.name for item in store.by_owner("ns", "chat")] == ["a", "b"]
    assert store.by_owner("other-ns", "chat") == ()
    assert store.owners() == {("ns", "chat"), ("ns", "other")}
    assert len(store) == len(list(store)) == 4


def test_what_an_owner_has_is_the_same_tuple_until_it_changes() -> None:
    store: Store[ChildFact] = Store(owner_of)
    a, b, other = fact("a"), fact("b"), fact("x", "other")
    for item in (a, b, other):
        store.put("services", key(item), item)
    first = store.by_owner("ns", "chat")
    store.put("services", key(other), fact("x", "other", version="2"))
    assert store.by_owner("ns", "chat") is first
    newer = fact("b", version="2")
    store.put("services", key(b), newer)
    assert store.by_owner("ns", "chat") == (a, newer) and first == (a, b)
    store.put("services", key(b), fact("b", "other"))  # it changes hands
    assert store.by_owner("ns", "chat") == (a,)
    store.remove("services", key(a))
    assert store.by_owner("ns", "chat") == ()


def test_an_object_that_changes_its_owner_leaves_the_old_one() -> None:
    store: Store[ChildFact] = Store(owner_of)
    store.put("s", ("k", "ns", "a"), fact("a", "one"))
    assert store.put("s", ("k", "ns", "a"), fact("a", "two")) == fact("a", "one")
    assert store.owners() == {("ns", "two")}


def test_replace_tells_what_appeared_changed_and_went() -> None:
    store: Store[ChildFact] = Store(owner_of)
    for item in (fact("same"), fact("changed"), fact("gone")):
        store.put("s", key(item), item)
    new = {key(item): item for item in (fact("same"), fact("changed", version="2"), fact("new"))}
    changes = store.replace("s", new)
    assert (fact("gone"), None) in changes
    assert (fact("changed"), fact("changed", version="2")) in changes
    assert (None, fact("new")) in changes
    assert len(changes) == 3
    assert {item.name for item in store} == {"same", "changed", "new"}


def test_a_scope_replaces_only_itself() -> None:
    store: Store[ChildFact] = Store(owner_of)
    store.put(("Service", None), ("Service", "ns", "a"), fact("a"))
    store.put(("Role", None), ("Role", "ns", "a"), fact("a", kind="Role"))
    assert store.replace(("Role", None), {}) == [(fact("a", kind="Role"), None)]
    assert store.get("Service", "ns", "a") is not None


def test_the_generation_grows_with_every_change_and_only_then() -> None:
    store: Store[ChildFact] = Store(owner_of)
    store.put("s", ("k", "ns", "a"), fact("a"))
    before = store.generation
    assert store.replace("s", {("k", "ns", "a"): fact("a")}) == []
    assert store.remove("s", ("k", "ns", "missing")) is None
    assert store.generation == before
    store.remove("s", ("k", "ns", "a"))
    assert store.generation > before


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 1), st.integers(0, 4), st.sampled_from(["x", "y", None])),
            st.tuples(st.just("remove"), st.integers(0, 1), st.integers(0, 4), st.none()),
            st.tuples(st.just("replace"), st.integers(0, 1), st.sets(st.integers(0, 4)), st.sampled_from(["x", "y", None])),
        ),
        max_size=40,
    )
)
def test_the_store_equals_a_plain_dict_and_its_changes_replay_to_the_same(steps: list[tuple[str, int, object, str | None]]) -> None:
    store: Store[ChildFact] = Store(owner_of)
    model: dict[tuple[str, ...], ChildFact] = {}
    replayed: dict[str, ChildFact] = {}

    def note(old: ChildFact | None, new: ChildFact | None) -> None:
        if new is not None:
            replayed[new.name] = new
        elif old is not None:
            replayed.pop(old.name)

    for what, scope, which, owner in steps:
        if what == "replace":
            assert isinstance(which, set)
            items = {(str(scope), str(n)): fact(f"{scope}-{n}", owner) for n in which}
            model = {k: v for k, v in model.items() if k[0] != str(scope)} | items
            for old, new in store.replace(scope, items):
                note(old, new)
        else:
            one = (str(scope), str(which))
            if what == "put":
                item = fact(f"{scope}-{which}", owner)
                note(store.put(scope, one, item), item)
                model[one] = item
            else:
                note(store.remove(scope, one), None)
                model.pop(one, None)
    assert {item.name: item for item in store} == {item.name: item for item in model.values()} == replayed
    for name in ("x", "y"):
        expected = {item.name for item in model.values() if item.labels.get(DEPLOYMENT) == name}
        assert {item.name for item in store.by_owner("ns", name)} == expected
