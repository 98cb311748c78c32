"""tutti export: writes the weights of a run into a directory, for other programs."""

from dataclasses import dataclass

from tutti.cli.flags import InputFolder, OutputFolder, parse
from tutti.measure.units import format_bytes
from tutti.train.run_directory import Format, check_export


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Export the weights of a run: tutti export --run runs/qwen --to exported

    The checkpoint can have any layout. It is read one tensor at a time. For a run with --model
    hf:FOLDER, the configuration and the tokenizer of FOLDER are exported too, so that
    from_pretrained can load the exported directory.
    """

    run: InputFolder
    """Run directory, which is the --out directory of tutti train."""
    to: OutputFolder
    """New directory for the exported files."""
    format: Format | None = None
    """`hf`: a directory for from_pretrained. `safetensors`: the weights as safetensors files.
    `state_dict`: model.pt for torch.load. `adapter`: only the LoRA adapter of a run with --lora, as
    a directory for PeftModel.from_pretrained. In the other formats, the adapter is merged into the
    weights (default: `hf` for a run with --model hf:FOLDER, else `safetensors`)."""
    checkpoint: str = "last"
    """Checkpoint to export: `last` (the newest complete checkpoint), `best` (the checkpoint with
    the best score, if the run was trained with --keep-best), or a step number."""
    ema: bool | None = None
    """Export the moving average of the weights (default if the run was trained with --ema).
    --no-ema exports the weights without averaging."""


def main(arguments: list[str]) -> int:
    options = parse(ExportFlags, "tutti export", arguments)
    check_export(options.run, options.checkpoint, options.to, options.format, options.ema)
    from tutti.train.checkpoint.exported_weights import Export

    export = Export(options.run, options.checkpoint, options.to, options.format, options.ema)
    export.write()
    average = " of the moving average" if export.ema else ""
    tensors = f"{len(export.entries)} tensors{average}, {format_bytes(export.nbytes)}"
    print(f"step {export.index['step']}: {tensors}, format {export.kind}, in {options.to}")
    return 0
