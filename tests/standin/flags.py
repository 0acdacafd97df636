"""Every flag of `vllm serve` 0.32, by the kind of its value (from vllm/engine/arg_utils.py and entrypoints/launchers/cli_args.py).

An operator that renders a flag that does not exist must fail here as it fails with vLLM.
"""

# one value, not looked at here
TEXT = """
--additional-config --all2all-backend --allowed-headers --allowed-local-media-path --allowed-methods --allowed-origins
--anthropic-disabled-thinking-effort --attention-backend --attention-config|-ac --aux-output-config --chat-template
--chat-template-content-format --code-revision --cohere-format --compilation-config|-cc --config --config-format --convert
--custom-histogram-buckets --data-parallel-address|-dpa --data-parallel-backend|-dpb --dcp-comm-backend
--default-chat-template-kwargs --default-mm-loras --diffusion-config|-dc --disable-access-log-for-endpoints
--distributed-executor-backend --download-dir --dtype --ec-manager-config --ec-transfer-config --engram-config --eplb-config
--expert-placement-strategy --fault-tolerance-config --fingerprint-mode --fingerprint-value --gdn-prefill-backend
--generation-config --hf-config-path --hf-overrides --host --io-processor-plugin --ir-op-priority --jit-monitor-mode
--kda-decode-backend --kda-prefill-backend --kernel-config --kv-cache-dtype --kv-events-config --kv-offloading-backend
--kv-transfer-config --limit-mm-per-prompt --linear-backend --load-format --log-config-file --log-level --logging-config
--logprobs-mode --lora-dtype --mamba-backend --mamba-cache-dtype --mamba-cache-mode --mamba-ssm-cache-dtype
--mamba-ssu-algorithm --master-addr --max-lora-rank --media-io-kwargs --mm-encoder-attn-backend --mm-encoder-attn-dtype
--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-tp-mode --mm-hasher-algorithm
--mm-processor-cache-type --mm-processor-device --mm-processor-kwargs --mm-tensor-ipc --model --model-class-overrides
--model-impl --model-loader-extra-config --moe-backend --offload-backend --optimization-level --otlp-traces-endpoint
--override-generation-config --per-request-spec-decode-metrics --performance-mode --pooler-config --prefix-caching-hash-algo
--profiler-config --pt-load-map-location --quantization|-q --quantization-config --reasoning-config --reasoning-parser
--reasoning-parser-plugin --response-role --revision --root-path --runner --safetensors-load-strategy --scheduler-cls
--scheduling-policy --show-hidden-metrics-for-version --sparse-indexer-topk-backend --spec-method --spec-model
--speculative-config|-sc --ssl-ca-certs --ssl-certfile --ssl-ciphers --ssl-keyfile --structured-outputs-config --tokenizer
--tokenizer-mode --tokenizer-revision --tool-call-parser --tool-parser-plugin --tool-server --tool-strict-level --uds
--uvicorn-log-level --video-pruning-method --watermark-config --weight-transfer-config --worker-cls --worker-extension-cls
"""

# a switch that also exists as --no-...
BOOLEAN = """
--allow-credentials --allow-deprecated-quantization --async-scheduling --cohere-is-reasoning-model --cudagraph-metrics
--data-parallel-external-lb|-dpe --data-parallel-hybrid-lb|-dph --dcp-q-replicate --disable-cascade-attn
--disable-chunked-mm-input --disable-custom-all-reduce --disable-fastapi-docs --disable-hybrid-kv-cache-manager
--disable-nccl-for-dp-synchronization --disable-sliding-window --disable-uvicorn-access-log --enable-auto-tool-choice
--enable-batch-sharded-sampling --enable-chunked-prefill --enable-cumem-allocator --enable-dbo --enable-elastic-ep
--enable-ep-weight-filter --enable-eplb --enable-expert-parallel|-ep --enable-fault-tolerance
--enable-flash-late-interaction --enable-flashinfer-autotune --enable-force-include-usage --enable-hc-sp
--enable-layerwise-nvtx-tracing --enable-log-deltas --enable-log-outputs --enable-log-requests
--enable-logging-iteration-details --enable-lora --enable-mamba-cache-stochastic-rounding
--enable-mamba-shared-prefix-checkpoint --enable-mfu-metrics --enable-mixed-moe-lora-format --enable-mm-embeds
--enable-moe-shared-loras --enable-nccl-comm-suspend --enable-offline-docs --enable-per-request-metrics
--enable-prefix-caching --enable-prompt-embeds --enable-prompt-tokens-details --enable-request-id-headers
--enable-return-routed-experts --enable-scale-out --enable-server-load-tracking --enable-shm-tensor-arena
--enable-sleep-mode --enable-ssl-refresh --enable-tokenizer-info-endpoint --enable-tower-connector-lora
--enable-trace-replay --enforce-eager --exclude-tools-when-tool-choice-none --fail-on-environ-validation
--fully-sharded-loras --interleave-mm-strings --jit-monitor-verbose --kv-cache-metrics --kv-sharing-fast-prefill
--language-model-only --log-error-stack --long-prefill-token-threshold-adaptive --mm-device-do-normalize --mm-encoder-only
--numa-bind --ray-workers-use-nsight --return-sampling-mask --return-tokens-as-token-ids --scheduler-reserve-full-isl
--skip-mm-profiling --skip-tokenizer-init --sleep-mode-offload-cudagraph --specialize-active-lora --swa-bounded-replay
--tokens-only --trust-remote-code --trust-request-chat-template --trust-request-mm-kwargs --use-fp64-gumbel --use-replayssm
--use-tqdm-on-load
"""

# one whole number; k, m, g (1000) and K, M, G (1024) are understood
NUMBER = """
--api-server-count|-asc --block-size --cp-kv-cache-interleave-size --cpu-distributed-timeout-seconds
--data-parallel-rank|-dpn --data-parallel-rpc-port|-dpp --data-parallel-size|-dp --data-parallel-size-local|-dpl
--data-parallel-start-rank|-dpr --data-parallel-supervisor-port --dbo-decode-token-threshold --dbo-prefill-token-threshold
--dcp-kv-cache-interleave-size --decode-context-parallel-size|-dcp --distributed-timeout-seconds
--dp-supervisor-probe-failure-threshold --dp-sync-interval --elastic-ep-max-dp-size --grpc-port --h11-max-header-count
--h11-max-incomplete-event-size --kv-cache-memory-bytes --long-prefill-token-threshold --mamba-block-size
--mamba-cache-philox-rounds --master-port --max-cpu-loras --max-cudagraph-capture-size --max-log-len --max-logprobs
--max-lora-cls-labels --max-loras --max-model-len --max-num-active-seqs --max-num-batched-tokens --max-num-queued-reqs
--max-num-queued-tokens --max-num-scheduled-tokens --max-num-seqs --max-parallel-loading-workers
--mm-shm-cache-max-object-size-mb --nnodes|-n --node-rank|-r --num-gpu-blocks-override --offload-group-size
--offload-num-in-group --offload-prefetch-step --pipeline-parallel-size|-pp --port --prefill-context-parallel-size|-pcp
--prefill-schedule-interval --prefix-cache-retention-interval --prefix-match-unit --renderer-num-workers
--replayssm-buffer-len --safetensors-prefetch-block-size --safetensors-prefetch-num-threads --seed --shutdown-timeout
--spec-tokens --sse-keep-alive-interval --ssl-cert-reqs --stream-interval --tensor-parallel-size|-tp --ubatch-size
"""

# one number
FRACTION = """
--cpu-offload-gb --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s
--gpu-memory-utilization|--device-memory-utilization --kv-cache-metrics-sample --kv-offloading-size
--mm-encoder-fp8-scale-save-margin --mm-ipc-gpu-memory-gb --mm-processor-cache-gb --video-pruning-rate --watermark
"""

# one or more values
MANY = """
--allowed-media-domains --api-key --collect-detailed-traces --cpu-offload-params --cudagraph-capture-sizes --device-ids
--ignore-patterns --kv-cache-dtype-skip-layers --logits-processors --lora-modules --lora-target-modules --numa-bind-cpus
--numa-bind-nodes --offload-params --served-model-name --sleep-preserve-parameter-names
"""

# a value or none
OPTIONAL = """
--hf-token
"""

# a switch without a negative form
SWITCH = """
--aggregate-engine-logging --data-parallel-multi-port-external-lb|-dpm --disable-log-stats --grpc --headless
"""

# one value, may be given several times
REPEATED = """
--middleware
"""
