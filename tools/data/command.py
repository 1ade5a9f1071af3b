"""The command `data`: own text, documents and conversations to a folder of tokens."""

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ...compiler.cli.command import Command, count, file_path
from ...compiler.cli.output import UsageError, show
from ...formats.token_folder import TokenFolder, TokenFolderError
from .chat import ChatTemplate, TemplateError, Turns
from .documents import AnswerReader, ChatReader, IdReader, PairReader, Reader, TextReader
from .encoding import TokenizerFiles, read_tokenizer
from .prepare import SAMPLE, Preparation, TokenizerChoice
from .sources import KINDS, STRETCH, BadRecord, SourceError, find_sources

FIELD = "text"


def data(options: Namespace) -> int:
    """`scalec data`."""
    try:
        tokenizer = read_tokenizer(options.tokenizer)
        template, reader = _reader(options, tokenizer)
        preparation = Preparation(
            options.output,
            find_sources(options.sources),
            reader,
            TokenizerChoice(tokenizer.path, options.bos or "", _eos(options, tokenizer)),
            template,
            options.skip_bad,
            options.shard_bytes,
        )
        with _progress() as progress:
            index = preparation.run(options.workers or os.cpu_count() or 1, progress)
    except BadRecord as bad:
        raise UsageError(f"{bad}\n--skip-bad leaves such records out, and counts them") from None
    except (SourceError, TokenFolderError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    show(_summary(options.output, index))
    return 0


def _reader(options: Namespace, tokenizer: TokenizerFiles) -> tuple[str, Reader]:
    """The template's text, "" without one, and how records become documents."""
    if (options.prompt is None) != (options.answer is None):
        raise UsageError("--prompt and --answer go together: a field each")
    forms = {
        "--field": options.field,
        "--chat": options.chat,
        "--prompt": options.prompt,
        "--pair": options.pair,
        "--ids": options.ids,
    }
    named = [name for name, value in forms.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} say two things of each record: choose one")
    if options.prompt is not None:
        return "", AnswerReader(options.prompt, options.answer)
    if options.ids is not None:
        return "", IdReader(options.ids)
    if options.chat is None and options.pair is None:
        for name, value in (("--template", options.template), ("--last-turn", options.last_turn)):
            if value:
                raise UsageError(f"{name} is for conversations: --chat FIELD")
        return "", TextReader(options.field or FIELD)
    text = _template(options, tokenizer)
    chat = _chat(options, tokenizer, text)
    if options.pair is not None:
        chosen, rejected = options.pair
        return text, PairReader(chosen, rejected, chat)
    if chat is None:
        raise UsageError(f"there is no template beside {tokenizer.path}: name one, --template FILE")
    return text, chat


def _template(options: Namespace, tokenizer: TokenizerFiles) -> str:
    if options.template is None:
        return tokenizer.template
    try:
        return options.template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {options.template}: {error}") from None


def _chat(options: Namespace, tokenizer: TokenizerFiles, text: str) -> ChatReader | None:
    if not text:
        return None
    try:
        template = ChatTemplate(text, tokenizer.special)
    except TemplateError as error:
        raise UsageError(f"the template: {error}") from None
    turns = Turns.LAST if options.last_turn else Turns.ALL
    return ChatReader(options.chat or "messages", template, turns)


def _eos(options: Namespace, tokenizer: TokenizerFiles) -> str:
    """The token at a document's end; a conversation's template writes its own."""
    if options.eos is not None:
        return options.eos
    if options.chat is not None or options.pair is not None or options.ids is not None:
        return ""
    if "eos_token" not in tokenizer.special:
        raise UsageError(
            f"nothing beside {tokenizer.path} says which token ends a document: name it, --eos"
            ' "</s>", or none, --eos ""'
        )
    return tokenizer.special["eos_token"]


class _Progress(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


@contextmanager
def _progress() -> Generator[_Progress]:
    """A bar on a terminal; elsewhere a line every ten seconds."""
    if sys.stderr.isatty():
        with _bar() as progress:
            yield progress
        return
    said = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"{done} of {total} shards", file=sys.stderr, flush=True)

    yield say


@contextmanager
def _bar() -> Generator[_Progress]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("shards", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def _summary(folder: Path, index: TokenFolder) -> str:
    """The folder's tokens, the share that counts, and the records that were left out."""
    lines = [
        f"{folder}: {index.tokens:,} tokens of {index.recipe.dtype} in {index.documents:,}"
        f" documents, {len(index.shards)} shards"
    ]
    if index.recipe.masked:
        share = 100 * index.counted / max(1, index.tokens)
        lines.append(f"{index.counted:,} of them count ({share:.0f}%)")
    for reason, number in sorted(index.skipped.items()):
        lines.append(f"left out: {number:,} × {reason}")
    lines.append(f"{folder / SAMPLE} shows the first documents")
    return "\n".join(lines)


def _arguments(parser: ArgumentParser) -> None:
    help = f"a file or a folder of {KINDS}; or hf:NAME[:SPLIT], a data set of the hub"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=help)
    help = "the folder to write to"
    parser.add_argument("-o", "--output", type=file_path, metavar="DIR", required=True, help=help)
    help = "the model's tokenizer.json, or the folder that has it"
    parser.add_argument("--tokenizer", metavar="FILE", required=True, help=help)
    records = parser.add_argument_group("each record", "one of these; --field text without")
    help = "the field of a document's text"
    records.add_argument("--field", metavar="FIELD", help=help)
    help = "the field of a conversation's messages; the assistant's turns count"
    records.add_argument("--chat", metavar="FIELD", help=help)
    help = "the field of a prompt, which does not count"
    records.add_argument("--prompt", metavar="FIELD", help=help)
    help = "the field of the answer to it"
    records.add_argument("--answer", metavar="FIELD", help=help)
    help = "the fields of a chosen and a rejected answer to `prompt`: text, or messages"
    records.add_argument("--pair", nargs=2, metavar=("CHOSEN", "REJECTED"), help=help)
    help = "a field of token ids of the same tokenizer"
    records.add_argument("--ids", metavar="FIELD", help=help)
    help = "a Jinja2 template of conversations (default: the one beside the tokenizer)"
    parser.add_argument("--template", type=file_path, metavar="FILE", help=help)
    help = "count the last turn of the assistant alone"
    parser.add_argument("--last-turn", action="store_true", help=help)
    help = "a token before each document (default: none)"
    parser.add_argument("--bos", metavar="TOKEN", help=help)
    help = "the token after each document (default: the tokenizer's; none after conversations)"
    parser.add_argument("--eos", metavar="TOKEN", help=help)
    help = "leave out records that give no document, and count them"
    parser.add_argument("--skip-bad", action="store_true", help=help)
    help = "processes that share the work (default: one for each core)"
    parser.add_argument("--workers", type=count, metavar="N", help=help)
    help = f"bytes of sources for a shard (default: {STRETCH:,})"
    parser.add_argument("--shard-bytes", type=count, metavar="N", default=STRETCH, help=help)


COMMAND = Command(
    data,
    _arguments,
    "Writes text, documents or conversations as token ids of a model's own tokenizer, with a"
    " bit for each token that\n"
    "the loss counts: answers do, prompts do not.  The folder's bytes depend on the sources and"
    " the options alone.\n"
    "A run that was killed goes on where it stopped when it is started again.  Broken records"
    " are told with file and\n"
    "line.",
    "scalec data chat.jsonl -o data/chat --tokenizer model/ --chat messages",
)
