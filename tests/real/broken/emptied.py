"""MultiConnector as it was before vLLM 0.26.0 (pull request 46865): only the connector that loads a request gets its blocks.

NIXL hands over all the same. LMCache is asked, stores nothing and warns of nothing. Engines see it by `kv_connector_module_path`.
"""

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector


class MultiConnector(multi_connector.MultiConnector):
    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        chosen = self._requests_to_connector.get(request.request_id, -1)
        for number, connector in enumerate(self._connectors):
            given = (blocks, num_external_tokens) if number == chosen else (blocks.new_empty(), 0)
            connector.update_state_after_alloc(request, *given)
