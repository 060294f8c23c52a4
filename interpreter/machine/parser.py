"""PTX text -> Program (PTX ISA 4, Syntax; 5.1 State spaces; 11.1 Kernel directives).

Only what a compiled kernel contains: one module, one entry, no functions. Names and labels in `{ }` are local to it.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from .hazards import Unsupported

STRIDES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


@dataclass(frozen=True)
class Address:
    """[base + offset] or [base, {coordinates}]."""

    base: str
    offset: int = 0
    coordinates: tuple[str, ...] = ()


Arg = str | Address | tuple[str, ...]  # a name or number ("a|b" and "!p" included), an address, {a, b, ...}


@dataclass(frozen=True)
class Instruction:
    opcode: str
    args: tuple[Arg, ...]
    line: int
    text: str
    guard: str | None = None  # the predicate of @p or @!p
    guard_negated: bool = False
    mods: tuple[str, ...] = ()  # the rest of the opcode, after the name under which a family registered it

    def only(self, *allowed: str) -> None:
        """Unsupported if the opcode has another modifier than these."""
        for mod in self.mods:
            if mod not in allowed:
                raise Unsupported(f"modifier .{mod} of {self.opcode}").at_line(self.line, self.text)

    def has(self, mod: str) -> bool:
        return mod in self.mods


@dataclass(frozen=True)
class Param:
    name: str
    offset: int
    size: int


@dataclass(eq=False)
class Program:
    name: str
    target: str
    threads: int | None  # .reqntid
    cluster: int | None  # .reqnctapercluster; 0 for .explicitcluster alone: what the launch says
    params: dict[str, Param]
    param_bytes: int
    shared: dict[str, tuple[int, int | None]]  # name -> (alignment, bytes; None for dynamic)
    registers: dict[str, str] = field(default_factory=dict)  # name or prefix< -> type
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    join: dict[int, int] = field(default_factory=dict)  # index of a branch -> where its sides meet again
    types: dict[str, str | None] = field(default_factory=dict)  # what register_type has answered

    def register_type(self, name: str) -> str | None:
        if name not in self.types:
            self.types[name] = self.registers.get(name) or self.registers.get(name.rstrip("0123456789") + "<")
        return self.types[name]

    def target_of(self, label: str, i: Instruction) -> int:
        if label not in self.labels:
            raise Unsupported(f"unknown label {label}").at_line(i.line, i.text)
        return self.labels[label]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_PLACE = re.compile(r"^[ \t]*\.(?:loc|file)\s[^\n]*", re.M)  # which end with their line
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w\d+)\s+(?:\.ptr\b[\s.\w]*?)?([\w$]+)(?:\[(\d+)\])?\s*$")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)(?:\[(\d*)\])?")
_TOKEN = re.compile(r"\s*(?:(\{)|(\})|([\w$]+)\s*:(?!:)|([^;]*);)")
_BRACKET = re.compile(r"[\[{(]")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)


@lru_cache(maxsize=2)
def parse(text: str) -> Program:
    text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), _PLACE.sub("", text))
    entry = _ENTRY.search(text)
    if entry is None or len(_ENTRY.findall(text)) != 1:
        raise Unsupported("wanted one .entry in the module")
    params, offset = {}, 0
    for declaration in filter(None, (x.strip() for x in entry[2].split(","))):
        m = _PARAM.match(" ".join(declaration.split()))
        if m is None:
            raise Unsupported(f"parameter {declaration!r}")
        size = STRIDES[m[2][1:]] * int(m[4] or 1)
        align = int(m[1] or 0) if m[4] else size
        offset = -(-offset // align) * align
        params[m[3]] = Param(m[3], offset, size)
        offset += size
    threads, cluster = extent(entry[3], "reqntid"), extent(entry[3], "reqnctapercluster")
    if cluster is None and ".explicitcluster" in entry[3]:
        cluster = 0
    target = re.search(r"\.target\s+([\w]+)", text)
    program = Program(
        name=entry[1],
        target=target[1] if target else "?",
        threads=threads,
        cluster=cluster,
        params=params,
        param_bytes=offset,
        shared={m[2]: (int(m[1] or 1), shared_size(m[3])) for m in _SHARED.finditer(text)},
    )
    _Body(program, text, entry.end()).read()
    program.join = joins(program)
    return program


def shared_size(count: str | None) -> int | None:
    """The bytes of `name`, which is one, of `name[count]`, or of `name[]`: as many as the launch says."""
    return 1 if count is None else int(count) if count else None


def extent(directives: str, name: str) -> int | None:
    """A directive's extent, x * y * z."""
    m = re.search(rf"\.{name}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    return None if m is None else int(m[1]) * int(m[2] or 1) * int(m[3] or 1)


class _Body:
    """The statements between the outer braces."""

    def __init__(self, program: Program, text: str, start: int):
        self.program, self.text, self.at = program, text, start
        self.line = text.count("\n", 0, start) + 1
        self.scopes: list[tuple[int, set[str]]] = [(0, set())]  # (number, local names)
        self.count = 0

    def read(self) -> None:
        text = self.text
        while True:
            token = _TOKEN.match(text, self.at)
            if token is None:
                raise Unsupported(f"line {self.line}: no statement")
            opening, closing, label, statement = token.groups()
            self.line += text.count("\n", self.at, start := token.start(token.lastindex or 0))
            self.at = start
            if opening:
                self.count += 1
                inside = text[start + 1 : self.closing(start)]
                names = set(re.findall(r"^\s*([\w$]+)\s*:(?!:)", inside, re.M))
                names |= {n.strip() for r in re.findall(r"\.reg\s+\.\w+\s+([^;]*);", inside) for n in r.split(",")}
                self.scopes.append((self.count, names))
            elif closing:
                self.scopes.pop()
                if not self.scopes:
                    return
            elif label:
                self.program.labels[self.local(label)] = len(self.program.code)
            else:
                self.statement(" ".join(statement.split()))
            self.line += text.count("\n", start, token.end())
            self.at = token.end()

    def closing(self, at: int) -> int:
        depth = 0
        for m in re.compile(r"[{}]").finditer(self.text, at):
            depth += 1 if m[0] == "{" else -1
            if depth == 0:
                return m.start()
        raise Unsupported("unbalanced braces")

    def local(self, name: str) -> str:
        for number, names in reversed(self.scopes):
            if name in names:
                return f"{name}@{number}"
        return name

    def statement(self, text: str) -> None:
        if text.startswith("."):
            if m := _REG.match(text):
                for name in (x.strip() for x in m[2].split(",")):
                    ranged = re.match(r"(.*)<\d+>$", name)
                    self.program.registers[ranged[1] + "<" if ranged else self.local(name)] = m[1]
            elif not text.startswith((".pragma", ".shared")):
                raise Unsupported(f"line {self.line}: directive {text}")
            return
        try:
            guard, negated, opcode, args = parts(text)
        except Unsupported as e:
            raise Unsupported(f"line {self.line}: {e}") from None
        if any(names for _, names in self.scopes):
            guard, args = guard and self.local(guard), tuple(map(self.localized, args))
        self.program.code.append(Instruction(opcode, args, self.line, text, guard, negated))

    def localized(self, arg: Arg) -> Arg:
        if isinstance(arg, Address):
            return Address(self.local(arg.base), arg.offset, tuple(map(self.local, arg.coordinates)))
        if isinstance(arg, tuple):
            return tuple(map(self.local, arg))
        return "|".join(map(self.local, arg.split("|")))


@lru_cache(maxsize=1 << 16)
def parts(text: str) -> tuple[str | None, bool, str, tuple[Arg, ...]]:
    """Guard, whether it is negated, opcode and operands of an instruction; many kernels have the same."""
    guard, negated, body = None, False, text
    if m := re.match(r"@(!?)([%\w$]+)\s+", text):
        guard, negated, body = m[2], bool(m[1]), text[m.end() :]
    opcode, _, rest = body.partition(" ")
    return guard, negated, opcode, tuple(map(operand, split(rest)))


def operand(text: str) -> Arg:
    if text.startswith("["):
        base, *rest = split(text[1:-1])
        coordinates: tuple[str, ...] = ()
        if rest:
            if not rest[0].startswith("{") or len(rest) > 1:
                raise Unsupported(f"address {text}")
            coordinates = tuple(split(rest[0][1:-1]))
        base, plus, offset = (x.strip() for x in base.partition("+"))
        return Address(base, int(offset, 0) if plus else 0, coordinates)
    return tuple(split(text[1:-1])) if text.startswith("{") else text


def split(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    if not _BRACKET.search(text):
        parts = [x.strip() for x in text.split(",")]
        return parts if parts[-1] else parts[:-1]
    parts, depth, start = [], 0, 0
    for n, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(text[start:n].strip())
            start = n + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def joins(program: Program) -> dict[int, int]:
    """Maps every conditional branch to the first instruction of its block's immediate post-dominator; -1 is the end."""
    code, end = program.code, len(program.code)
    starts = {0, *program.labels.values()} | {n + 1 for n, i in enumerate(code) if is_jump(i)}
    blocks = sorted(s for s in starts if s < end)
    index = {s: n for n, s in enumerate(blocks)}
    exit_ = len(blocks)
    successors: list[list[int]] = []
    for n in range(exit_):
        stop = blocks[n + 1] if n + 1 < exit_ else end
        last, after = code[stop - 1], n + 1
        to = []
        if is_return(last):
            to.append(exit_)
        elif last.opcode.startswith("bra"):
            to.append(index.get(program.target_of(str(last.args[0]), last), exit_))
        if not is_jump(last) or last.guard is not None:
            to.append(after)
        successors.append(to)
    successors.append([])
    predecessors: list[list[int]] = [[] for _ in successors]
    for n, to in enumerate(successors):
        for s in to:
            predecessors[s].append(n)
    order, seen, stack = [], {exit_}, [(exit_, iter(predecessors[exit_]))]
    while stack:  # post-order of the reversed graph
        node, rest = stack[-1]
        for p in rest:
            if p not in seen:
                seen.add(p)
                stack.append((p, iter(predecessors[p])))
                break
        else:
            order.append(node)
            stack.pop()
    rank = {node: n for n, node in enumerate(order)}
    above: dict[int, int] = {exit_: exit_}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            best: int | None = None
            for s in successors[node]:
                if s not in above:
                    continue
                other: int = s
                if best is None:
                    best = other
                    continue
                while best != other:
                    while rank[best] < rank[other]:
                        best = above[best]
                    while rank[other] < rank[best]:
                        other = above[other]
            if best is not None and above.get(node) != best:
                above[node], changed = best, True
    result = {}
    for n in range(exit_):
        stop = blocks[n + 1] if n + 1 < exit_ else end
        if code[stop - 1].guard is not None and is_jump(code[stop - 1]):
            join = above.get(n, exit_)
            result[stop - 1] = blocks[join] if join < exit_ else -1
    return result


def is_return(i: Instruction) -> bool:
    return i.opcode in ("ret", "exit", "ret.uni", "trap")


def is_jump(i: Instruction) -> bool:
    return is_return(i) or i.opcode in ("bra", "bra.uni")
