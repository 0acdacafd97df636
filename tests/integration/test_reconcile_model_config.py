"""model.configMapRef against a real API server: missing, malformed, refused by what it says, mended without an edit of the spec."""

from __future__ import annotations

import json
from typing import Any

from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator

pytest_plugins = ("opsrunner.fixtures",)

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
ENGRAM = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": {"engram_layer_ids": [1, 14]}}


def refused(api: Api, space: str, reason: str, *words: str) -> Object:
    """Accepted=False with the reason and the words; nothing is made."""
    obj = waits.condition(api, space, "judged", "Accepted", "False", reason)
    message = waits.conditions(obj)["Accepted"]["message"]
    assert message.startswith("spec.model.configMapRef.name=the-model: ") and all(word in message for word in words), message
    assert state.children(api, space, "judged") == {}
    return obj


def nudge(api: Api, space: str, number: int) -> None:
    """An event of the object, so that the test need not wait until the ConfigMap is looked at again."""
    api.merge("PDDeployment", space, "judged", {"metadata": {"labels": {"nudge": str(number)}}})


def test_a_model_is_judged_by_its_config_map(api: Api, operator: Operator, space: str) -> None:
    def put(number: int, data: dict[str, Any]) -> None:
        api.merge("ConfigMap", space, "the-model", {"data": data})
        if number:
            nudge(api, space, number)

    api.create(state.pdd(space, "judged", model={"uri": "hf://org/model", "configMapRef": {"name": "the-model"}}))
    refused(api, space, "MissingReference", "ConfigMap the-model does not exist in this namespace; create it")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "the-model", "namespace": space}}
    api.create({**body, "data": {"config.yaml": "a"}})
    nudge(api, space, 1)
    refused(api, space, "InvalidSpec", "ConfigMap the-model, key config.json is missing (there is config.yaml)")
    put(2, {"config.json": "{"})
    waits.until(
        "the new problem to be named", lambda: "is not JSON" in str(api.must_get("PDDeployment", space, "judged")["status"])
    )
    put(3, {"config.json": json.dumps(ENGRAM)})
    refused(api, space, "StateNotTransferable", "(engram_layer_ids) needs Engram token history at handoff", "accepted: ")
    put(0, {"config.json": json.dumps(LLAMA)})  # no event of the object: it is looked at again by itself
    ready = waits.ready(api, space, "judged")
    assert waits.conditions(ready)["Accepted"]["message"] == "the spec was accepted"
    assert ready["spec"]["model"] == {"uri": "hf://org/model", "configMapRef": {"name": "the-model"}}
    api.delete("PDDeployment", space, "judged")
