# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a small Llama with LoRA, by the Trainer of Hugging Face, with folded activations.

    python examples/python/trainer_lora.py

The Llama has random weights, so that nothing is downloaded: put from_pretrained() in its place. The
callback is all that Backfold adds. It logs what is held beside the loss, saves its state with each
checkpoint (--resume goes on from the last one) and writes a report.
"""

import argparse
import pathlib
import sys
from pydoc_data.topics import topics

import torch

try:
    from backfold.transformers import FoldCallback
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ImportError as missing:
    sys.exit(f"this example needs transformers, accelerate and peft: {missing}")

CONTEXT = 128


class Excerpts(torch.utils.data.Dataset):
    """Pydoc's topics, byte by byte."""

    def __init__(self) -> None:
        self.bytes = torch.tensor(list("".join(topics.values()).encode()))

    def __len__(self) -> int:
        return len(self.bytes) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.bytes[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": text, "labels": text}


def llama() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    torch.manual_seed(0)
    adapters = LoraConfig(
        r=8,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(LlamaForCausalLM(config), adapters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/trainer_lora"))
    chosen = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=str(chosen.output),
        max_steps=chosen.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=max(chosen.steps // 6, 1),
        save_steps=max(chosen.steps // 2, 1),
        bf16=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    callback = FoldCallback(bits=4)
    trainer = Trainer(llama(), arguments, train_dataset=Excerpts(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=chosen.resume)
    report = callback.fold.report().to_dict()
    print(f"held {report['held_bytes']:,} of {report['unique_bytes']:,} bytes")
    print(f"report: {chosen.output / 'backfold-report.txt'}")


if __name__ == "__main__":
    main()
