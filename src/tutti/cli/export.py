"""tutti export: writes the weights of a run as a folder for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.cli.flags import parse
from tutti.measure.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Export the weights of a run: tutti export --run runs/qwen --to exported

    Reads a checkpoint of any layout, one tensor at a time. For a run with --model hf:FOLDER, the
    exported files include the configuration and the tokenizer of FOLDER, so that from_pretrained
    can load them.
    """

    run: Path
    """Run directory, which is the --out directory of tutti train."""
    to: Path
    """New directory for the exported files."""
    format: Literal["safetensors", "hf", "state_dict", "adapter"] | None = None
    """hf: a folder for from_pretrained. safetensors: the weights as safetensors files. state_dict:
    model.pt for torch.load. adapter: only the LoRA adapter of a run with --lora, as a folder for
    PeftModel.from_pretrained; the other formats contain the adapter merged into the weights
    (default: hf for a run of --model hf:FOLDER, else safetensors)."""
    checkpoint: str = "last"
    """Checkpoint to export: last (the newest complete checkpoint), best (the checkpoint with the
    best score of --keep-best), or the number of its step."""
    ema: bool | None = None
    """Export the moving average of the weights, or with --no-ema the weights themselves. Default:
    the average if the run was trained with --ema."""


def main(arguments: list[str]) -> int:
    options = parse(ExportFlags, "tutti export", arguments)

    from tutti.train.checkpoint.exported_weights import Export

    export = Export(options.run, options.checkpoint, options.to, options.format, options.ema)
    export.write()
    average = " of the moving average" if export.ema else ""
    tensors = f"{len(export.entries)} tensors{average}, {format_bytes(export.nbytes)}"
    print(f"step {export.index['step']}: {tensors}, format {export.kind}, in {options.to}")
    return 0
