"""What a planted bug is (bugs.py lists them), and how it comes into its file."""

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WIDE = ("avx512bw",)  # words of /proc/cpuinfo: a processor with AVX-512


@dataclasses.dataclass(frozen=True)
class Bug:
    """One replacement of text in one file.

    Attributes:
      name: what the runner calls it.
      room: one of ROOMS (bugs.py).
      file: the file, from the root of the checkout.
      text: what is replaced; it occurs there exactly once.
      replacement: what stands there instead.
      breaks: what is wrong then, in one line.
      focus: the test files or folders that are most likely to notice it.
      needs: words of /proc/cpuinfo without which no processor runs what it breaks.
    """

    name: str
    room: str
    file: str
    text: str
    replacement: str
    breaks: str
    focus: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def language(self) -> str:
        suffix = Path(self.file).suffix
        return {".py": "Python", ".cuh": "CUDA"}.get(suffix, "C++")


class Moved(ValueError):
    """The text of a bug is not in its file exactly once."""


def planted(bug: Bug, content: str, root: Path = ROOT) -> str:
    """The content of the bug's file with the bug in it.

    Raises:
      Moved: the text does not occur exactly once; names the files that have it now.
    """
    count = content.count(bug.text)
    if count != 1:
        raise Moved(
            f"{bug.name}: expected its text once in {bug.file}, found it {count} times. "
            f"{_whereabouts(bug, root)} Mend the entry in tests/mutants/."
        )
    return content.replace(bug.text, bug.replacement)


def _whereabouts(bug: Bug, root: Path) -> str:
    suffix = Path(bug.file).suffix
    paths = [
        p for folder in ("sgap_jax", "cpu", "cuda") for p in (root / folder).rglob(f"*{suffix}")
    ]
    found = [str(p.relative_to(root)) for p in sorted(paths) if bug.text in p.read_text()]
    return f"It is in {', '.join(found)} now." if found else "No other file has it."
