"""Says which programs there are: `python -m examples.deepseek_v4`."""

import ast
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
    if '__name__ == "__main__"' in (text := path.read_text()):
        first = " ".join(ast.get_docstring(ast.parse(text)).split("\n\n")[0].split())
        print(f"python -m examples.deepseek_v4.{path.stem} --help\n    {first}")
