"""transformers as a user would run it on the same weights: start to first token, and a static batch. Prints JSON.

Runs in the peers' environment or in Stoker's own: `python transformers_batch.py FILE.gguf cold|write DIR|batch N...`
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

BEGIN = time.perf_counter()

import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.modeling_utils  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def main() -> None:
    # Reading a GGUF asks for accelerate, although nothing of it is used for a model of this size.
    transformers.modeling_utils.is_accelerate_available = lambda *_: True
    gguf, mode, *rest = sys.argv[1:]
    path = pathlib.Path(gguf)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    if mode == "cold":
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=1, do_sample=False)
        print(json.dumps({"first_token_s": time.perf_counter() - BEGIN}))
    elif mode == "write":
        out = pathlib.Path(rest[0])
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None  # it only unpacked the file: what is in memory is plain float32
        model.config.architectures, model.config.dtype = ["LlamaForCausalLM"], torch.float32
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    else:
        for n in map(int, rest):
            rates = []
            for attempt in range(3 if n < 32 else 2):
                prompts = [f"{attempt * 1000 + i} " + " ".join(f"word{k}" for k in range(42)) for i in range(n)]
                tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
                batch = tokenizer(prompts, return_tensors="pt", padding=True)
                start = time.perf_counter()
                with torch.inference_mode():
                    out = model.generate(**batch, max_new_tokens=64, min_new_tokens=64, do_sample=False)
                made = (out.shape[1] - batch.input_ids.shape[1]) * n
                rates.append(made / (time.perf_counter() - start))
            print(json.dumps({"at_once": n, "output_tokens_per_s": sorted(rates)[len(rates) // 2]}), flush=True)


main()
