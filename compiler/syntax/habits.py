"""How other languages write things: where a text that is no plan does so, and how a plan says
it.
"""

import re
from collections.abc import Iterator

from attrs import frozen

from .diagnostics import Diagnostic
from .source import Source

REACH = 400
"""How far from the place where the parser stopped a habit may lie, in characters."""

_COMMENT = re.compile(r'("(?:[^"\\\n]|\\[^\n])*"?)|#[^\n]*')


@frozen
class Habit:
    """Something that is written otherwise in a plan.

    `pattern` is looked for where the parser stopped; its group `at`, or else all of it, is the
    place that is shown.  Message and help may name its groups, as in `{op}`.  Where `within` names
    sections, it is one of these alone.
    """

    pattern: str
    message: str
    help: str
    within: tuple[str, ...] = ()


_FILE = r"[\w./*?~-]*\.(?:txt|md|py|jsonl?|bin|npy|csv|tsv|parquet|scale|safetensors)\b"
_INVISIBLE = "[\u00a0\u00ad\u200b-\u200f\u2028\u2029\u202f\u2060\u3000\ufeff]"

HABITS = (
    # files of Python
    Habit(
        r"^[ \t]*(?P<at>(?:from[ \t]+[\w.]+[ \t]+)?import\b[^\n]*)",
        "a plan imports no modules",
        'ops need no import; `use "models/llama.scale"` includes another plan; `op … from'
        ' "my_ops:swiglu"` names a '
        "function of your own",
    ),
    Habit(
        r'\b(?P<at>include|import)\s*(?P<file>"[^"\n]*")',
        "another plan is used, not included",
        "write `use {file}`",
    ),
    Habit(
        r"\b(?P<at>(?:def|class)[ \t]+(?P<name>\w+))",
        "a plan declares a model",
        "write `model {name}(tokens[batch, seq], labels[batch, seq]) {{ … }}`",
    ),
    Habit(
        r"\b(?P<at>for[ \t]+_[ \t]+in[ \t]+(?:range\(\s*)?(?P<dim>\w+)\)?)",
        "there is no `for`",
        "write `repeat {dim} {{ … }}`",
    ),
    Habit(
        r"\b(?P<at>for[ \t]+(?P<i>\w+)[ \t]+in[ \t]+(?:\w+\(\s*)?"
        r"(?:0\s*,\s*|self\.)?(?P<dim>\w+)\)?)",
        "there is no `for`",
        "write `repeat {dim} {{ … }}`, or `repeat {dim} as {i} {{ … }}` where `if` needs the index",
    ),
    Habit(
        r"(?P<at>\b(?:elif|else[ \t]+if)\b)",
        "a branch has one `else`",
        "put a branch inside the other one into its braces: `else {{ if … {{ … }} }}`",
    ),
    Habit(
        r"\b(?P<at>model[ \t]+(?P<name>\w+)\s*(?:(?=\{)|\([^\[\]{}\n]*))",
        "a model has inputs, with their dims",
        "write `model {name}(tokens[batch, seq], labels[batch, seq]) {{ … }}`",
    ),
    Habit(
        r"\b(?:model|repeat|if|else)\b[^\n:{}]*(?P<at>:)(?!=)",
        "a block has braces",
        "write `{{ … }}` around it, without `:`",
    ),
    Habit(
        r"\b(?P<at>return\b[^\n]*)",
        "a model returns nothing",
        "write `loss = cross_entropy(logits, labels)`: training minimises the value named `loss`",
    ),
    Habit(r"^[ \t]*(?P<at>@[ \t]*[\w.]+)", "there are no decorators", "leave it out"),
    Habit(
        r"\b(?P<at>lambda)\b[^\n]*",
        "there are no functions",
        'write the ops, or declare `op … from "my_ops:swiglu"`',
    ),
    # comments
    Habit(
        r"(?P<at>\"\"\"|''')", "this is not a comment", "comments begin with `#`, each line of them"
    ),
    Habit(r"(?P<at>/\*)", "this is not a comment", "comments begin with `#`, each line of them"),
    Habit(r"^[ \t]*(?P<at>//|--)[^\n]*", "this is not a comment", "comments begin with `#`"),
    Habit(
        r"(?P<at>//)",
        "`//` is neither a comment nor a division",
        "comments begin with `#`; `a / b` divides",
    ),
    # quotes
    Habit(
        r"(?P<at>[“”„‘’`'](?P<text>[^“”„‘’`'\n\"]*)[“”‘’`'])",
        'a string begins and ends with `"`',
        'write `"{text}"`',
    ),
    Habit(r"(?P<at>[“”„‘’`'])", 'a string begins and ends with `"`', 'write `"` in its place'),
    Habit(rf"(?<![\w\"])(?P<at>{_FILE})", "a file's name has quotes", 'write `"{at}"`'),
    Habit(r"(?P<at>\"(?P<key>\w+)\")\s*[:=]", "a key has no quotes", "write `{key} = …`"),
    # sections
    Habit(
        r"\b(?P<at>(?P<kind>\w+)\s*[=:])\s*(?:(?P<name>[A-Za-z_]\w*)\s*)\{",
        "a section has no `=`",
        "write `{kind} {name} {{ … }}`",
    ),
    Habit(r"\b(?P<at>(?P<kind>\w+)\s*[=:])\s*\{", "a section has no `=`", "write `{kind} {{ … }}`"),
    Habit(
        r"\b(?P<at>(?P<kind>dims|const)[ \t]+(?P<key>\w+)\s*=)",
        "a section is expected here",
        "write `{kind} {{ {key} = … }}`",
    ),
    Habit(
        r"\b(?P<kind>mesh|shard|train|cluster|state|pipeline|dims|const)\s*(?P<at>[(\[])",
        "a section has braces",
        "write `{kind} {{ … }}`",
    ),
    Habit(
        r"\b(?P<kind>optimizer|data|group)[ \t]+(?P<name>\w+)\s*(?P<at>[(\[])",
        "a section has braces",
        "write `{kind} {name} {{ … }}`",
    ),
    # rules
    Habit(
        r"\b(?P<at>(?P<dim>\w+)\s*"
        r"(?:->|=>|:|→|\bon\b|\bacross\b|\balong\b|\bby\b|\bto\b|\bin\b)\s*(?P<axis>\w+))",
        "this is not a rule",
        "write `{dim} over {axis}`",
        within=("shard", "state"),
    ),
    Habit(
        r"\bover\s+(?P<at>[\[(]\s*(?P<axes>\w+(?:\s*,\s*\w+)*)\s*[\])])",
        "the axes of a rule have no brackets",
        "write `over {axes}`",
    ),
    Habit(
        r"\bover[ \t]+(?P<one>\w+)[ \t]+(?P<at>x|and|\*|×)[ \t]+(?P<two>\w+)",
        "the axes of a rule are separated by commas",
        "write `over {one}, {two}`, the outer axis first",
    ),
    Habit(r"(?P<at>,)\s*over\b", "one comma too many", "leave it out"),
    # initial values
    Habit(
        r"\binit(?P<names>(?:[ \t]+\w+(?:\s*,\s*\w+)*)?)\s*(?P<at>[=:])",
        "initial values follow `~`",
        "write `init{names} ~ …`",
    ),
    Habit(r"\binit\s*(?P<at>\{)", "`init` is not a section", "write `init ~ normal(0.02)`"),
    Habit(
        r"^[ \t]*(?P<at>(?P<name>(?!init\b)\w+)[ \t]*~)",
        "initial values begin with `init`",
        "write `init {name} ~ …`",
    ),
    # parameters and arguments
    Habit(
        r"\b(?P<name>\w+)(?P<at>\((?P<ins>[\w\s,]*\w)\s*(?:->|=>|→)\s*(?P<outs>[\w\s,]*\w)\s*\))",
        "a parameter has brackets",
        "write `{name}[{ins} -> {outs}]`",
    ),
    Habit(
        r"\[[\w\s,]+(?P<at>=>|<-|>|→|⟶|⇒)",
        "this is not an arrow",
        "write `->`, as in `w[hidden -> ffn]`",
    ),
    Habit(
        r"\b\w+\[[^\]\n]*?(?P<at>:|\.\.\.?|-(?!>))",
        "tensors have no index",
        "dims go by name; `split` takes a dim apart, as in `gate, up = split(y, [ffn, ffn])`",
    ),
    Habit(r"(?P<at>,)\s*[)\]]", "one comma too many", "leave it out"),
    # what belongs to modules and tensors of PyTorch
    Habit(
        r"(?P<at>\b(?:\w+\.)*Linear\("
        r"\s*(?P<inner>[A-Za-z_]\w*)\s*,\s*(?P<outer>[A-Za-z_]\w*)[^)\n]*\))",
        "there are no modules",
        "write `x @ w[{inner} -> {outer}]`, and `+ b[{outer}]` for a bias",
    ),
    Habit(
        r"(?P<at>\b(?:\w+\.)*Embedding\("
        r"\s*(?P<rows>[A-Za-z_]\w*)\s*,\s*(?P<width>[A-Za-z_]\w*)[^)\n]*\))",
        "there are no modules",
        "write `embedding(tokens, wte[{rows}, {width}])`",
    ),
    Habit(
        r"(?P<at>\b(?P<module>(?:nn|torch|math|np|numpy|F|functional)(?:\.\w+)*)\.(?P<op>\w+))",
        "names have no module",
        "write `{op}(…)` without `{module}.`, if there is such an op",
    ),
    Habit(
        r"\bself\.(?P<name>\w+)",
        "there is no `self`",
        "a parameter is declared where it is used, by its dims: `{name}[hidden -> ffn]`",
    ),
    Habit(
        r"\b\w+(?P<at>\.(?:T|mT|t|transpose|permute|swapaxes|movedim)\b)",
        "there are no transposes",
        "leave it out: dims have names, and `@` sums over those that both sides have",
    ),
    Habit(
        r"\b\w+(?P<at>\.(?:view|reshape|flatten|unflatten|squeeze|unsqueeze|expand|contiguous"
        r"|shape|size)\b)",
        "tensors are not reshaped",
        "dims have names: `x @ wq[hidden -> heads, head_dim]` makes heads, `o @ wo[heads,"
        " head_dim -> hidden]` joins "
        "them",
    ),
    Habit(
        r"\b(?P<name>[A-Za-z_]\w*)(?P<at>\.(?P<op>[A-Za-z_]\w*))\s*\(",
        "values have no methods",
        "write `{op}({name}, …)`, if there is such an op",
    ),
    Habit(
        r"\b[A-Za-z_]\w*(?P<at>\.[A-Za-z_]\w*)", "values have no attributes", "a name has no dot"
    ),
    # statements and operators
    Habit(
        r"(?P<at>\((?P<names>\w+(?:\s*,\s*\w+)+)\s*\))\s*=",
        "names are bound without parentheses",
        "write `{names} = …`",
    ),
    Habit(
        r"\b(?P<name>\w+)\s*(?P<at>(?P<op>[-+*/@])=)",
        "there is no `{op}=`",
        "write `{name} = {name} {op} …`",
    ),
    Habit(
        r"(?<!\bif )\b(?P<name>\w+)\s*(?P<at>:=|==|<-)",
        "a name is bound by `=`",
        "write `{name} = …`",
    ),
    Habit(
        r"\b(?P<name>\w+)(?P<at>\s*:\s*[\w.\[\], ]+?)\s*=[^=]",
        "names have no types",
        "write `{name} = …`",
    ),
    Habit(
        r"^[ \t]*(?P<at>let|var|val|auto|const|float|int|Tensor)[ \t]+(?P<name>\w+)\s*=",
        "names are not declared",
        "write `{name} = …`",
    ),
    Habit(
        r"(?P<at>\*\*|\^)", "there is no power operator", "multiply, `x * x`, or write the number"
    ),
    Habit(
        r"(?P<at>\\)\s*$",
        "a line continues without `\\`",
        "leave it out: a statement ends where it is complete",
    ),
    Habit(
        r"(?P<at>\d+\.)(?!\d)",
        "a number ends with a digit",
        "write `{at}0`, or leave the point out",
    ),
    Habit(r"(?<![\d.])(?P<at>\.\d+)", "a number begins with a digit", "write `0{at}`"),
    Habit(r"(?P<at>[×·∙⋅])", "this is not an operator", "write `*`, or `@` for a matrix product"),
    Habit(r"(?P<at>÷)", "this is not an operator", "write `/`"),
    Habit(r"(?P<at>[−–—])", "this is not an operator", "write `-`"),
    Habit(
        r"(?P<at>[|&!?$])",
        "this is not an operator",
        "tensors have `@ * / + -`; functions are ops, as in `silu(x)`",
    ),
    Habit(rf"(?P<at>{_INVISIBLE}+)", "an invisible character", "delete it, or write a space"),
    Habit(
        r"(?:[=+*/@(,]|\s-)\s*(?P<at>(?P<op>[A-Za-z_]\w*)[ \t]+"
        r"(?!(?:over|as|pad|from)\b)(?P<x>[A-Za-z_]\w*))",
        "there is no operator between `{op}` and `{x}`",
        "write `{op}({x})` if `{op}` is an op, or an operator between them",
    ),
    Habit(
        r"^[ \t]*(?P<at>(?!(?:init|op|model|repeat|if|else)\b)\w+)\([^\n]*",
        "the result of `{at}` has no name",
        "a statement binds a name: `y = {at}(…)`",
    ),
    Habit(
        r"^[ \t]*(?P<at>\w+)[ \t]*[-+*/@](?![=>])",
        "this value has no name",
        "a statement binds a name: `y = {at} …`",
    ),
    Habit(
        r"^[ \t]*\w+(?:\s*,\s*\w+)+\s*=(?!=)[^\n]*?(?P<at>,)",
        "several values in one statement",
        "write a statement for each name",
    ),
    Habit(
        r"\b(?P<at>(?!(?:use|model|op|init|repeat|if|else)\b)"
        r"(?i:use|model|op|init|repeat|if|else)\b)[^\n]*",
        "the language's own words are in lower case",
        "write `{at}` in lower case",
    ),
    Habit(
        r"\b(?P<key>\w+)\s*(?P<at>:)\s*(?P<value>[\w.%-]+|\"[^\"\n]*\")",
        "a setting is written with `=`",
        "write `{key} = {value}`",
    ),
)


def find_habit(source: Source, places: tuple[int, ...], section: str) -> Diagnostic | None:
    """The error of the first habit of the table at one of the places where the parser stopped
    or opened a brace.
    """
    code = _COMMENT.sub(lambda match: match[1] or " " * len(match[0]), source.text)
    for habit in HABITS:
        if habit.within and section not in habit.within:
            continue
        for place in places:
            match = next(_matches(habit.pattern, code, place), None)
            if match:
                words = match.groupdict()
                span = source.span(*match.span("at" if "at" in words else 0))
                message, help = habit.message.format(**words), habit.help.format(**words)
                return Diagnostic("E0104", message, span, help=help)
    return None


def _matches(pattern: str, code: str, place: int) -> Iterator[re.Match[str]]:
    """The matches of the pattern around `place`: in its line, or at the end of the line before,
    with at most a word between.
    """
    line = code.rfind("\n", 0, place) + 1
    start = code.rfind("\n", 0, len(code[:line].rstrip())) + 1
    end = code.find("\n", place)
    if end < 0:
        end = len(code)
    start, end = max(start, place - REACH), min(end, place + REACH)
    for match in re.compile(pattern, re.MULTILINE).finditer(code, start, end):
        between = code[match.end() : place]
        if match.start() <= place and re.fullmatch(r"\s*(\n\s*\w+\s*)?", between):
            yield match
