"""A plan with a mistake, in which real editors mend and rename things; it uses a model in a
file beside it.
"""

import re
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "06_mlp.scale"
PLAN = """use "modèles 😀/tiny.scale" { dims { hidden = 64 } }
mesh  { dp = 2  tp = 2 }
shard   { batch over dp  ffn over tp }
train {
  seq = 128  global_batch = 8  microbatch = 4  max_steps = 20
  optimizer adamw { lr = 1e-3 }
  data text       { files = [python_stdlib] }
}
"""


def write_plan(folder: Path) -> None:
    """Writes the plan and its model; names with characters of two bytes, and of four, are
    before others in a line.
    """
    model = re.search(r"model mlp.*?\n}\n", EXAMPLE.read_text(), re.DOTALL)
    assert model
    (folder / "modèles 😀").mkdir()
    (folder / "modèles 😀" / "tiny.scale").write_text(model[0], encoding="utf-8")
    (folder / "plan.scale").write_text(PLAN, encoding="utf-8")
