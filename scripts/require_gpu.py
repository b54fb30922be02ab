"""Exit code 0 and the names of the CUDA devices, or exit code 1 and why there is none."""

import sys

import torch


def main() -> int:
    """What `make gpu` asks before anything else."""
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
        print(
            f"no GPU: torch {torch.__version__}, built for {build}, finds no CUDA device, so no GPU test was run.\n"
            "Run `make gpu` on a machine with an NVIDIA GPU and driver (`nvidia-smi` lists it) and a CUDA build of "
            "torch;\n`make gpu PY=python3` uses the packages of that interpreter as they are.",
            file=sys.stderr,
        )
        return 1
    for index in range(torch.cuda.device_count()):
        print(f"cuda:{index} {torch.cuda.get_device_name(index)}, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
