"""What a compiled program does, read from its optimised HLO text: products, collectives and kernels, loops counted.

XLA's own cost analysis counts a loop's body once, and a program compiled without a device has none at all. Here the
text of `compiled.as_text()` is walked from its entry, every while loop multiplied by the trip count that XLA found.
The text is the program of one device, so every figure is for one device and one call. Written against the text of
jaxlib 0.10; the CPU and the CUDA compiler print alike but differ in what they call a product.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from somaspeed_jax.scaling.flops import Product

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# No kernel of their own: bookkeeping, and the halves of an asynchronous operation after the first.
_DONE = tuple(f"{kind}-done" for kind in (*COLLECTIVES, "async", "copy", "send", "recv"))
_CALLS = ("while", "call", "conditional", "async-start", "async-update")
_DATA = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier")
_FREE = frozenset((*_DONE, *_CALLS, *_DATA, "partition-id", "replica-id"))


class Instruction(NamedTuple):
    """One line of HLO. `shape` and `rest` (operands' attributes) are as printed; `operands` are names."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program.

    kind: of COLLECTIVES.
    types: element types of its results.
    bytes: of its results on one device: the whole after an all-gather, the shard after a reduce-scatter.
    group: devices that take part together.
    count: how often it runs.
    scope: jax's path of the operation that it belongs to.
    """

    kind: str
    types: tuple[str, ...]
    bytes: int
    group: int
    count: int
    scope: str

    @property
    def total(self) -> int:
        return self.count * self.bytes

    @property
    def wire(self) -> float:
        """Bytes that a device sends in all runs, by ring algorithms (the "bus bandwidth" factors of NCCL's tests)."""
        n = self.group
        factor = {
            "all-gather": (n - 1) / n,
            "reduce-scatter": n - 1,
            "all-reduce": 2 * (n - 1) / n,
            "all-to-all": (n - 1) / n,
            "collective-permute": 1,
        }[self.kind]
        return self.total * factor


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch: an instruction outside of fusions that does work.

    target: of a custom call, else empty.
    flops: of the products in one run.
    bytes: that one run reads and writes in device memory. Of an array that is only sliced or updated in place the slice
      counts; caches are not modelled; a collective's are left to its link.
    """

    name: str
    opcode: str
    target: str
    count: int
    flops: int
    bytes: int
    scope: str


@dataclasses.dataclass(frozen=True)
class Program:
    """What one device does in one call, in program order."""

    products: tuple[Product, ...]
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]

    @property
    def flops(self) -> int:
        """Of all products; recomputation included, elementwise work not."""
        return sum(product.total for product in self.products)

    def collective(self, kind: str) -> tuple[int, int]:
        """(runs, result bytes) of one kind of collective."""
        found = [c for c in self.collectives if c.kind == kind]
        return sum(c.count for c in found), sum(c.total for c in found)


def read(text: str) -> Program:
    """The Program of `compiled.as_text()`.

    Raises ValueError for text without an entry, and for products or collectives in a loop of unknown trip count.
    """
    computations, entry = _computations(text)
    products, collectives, launches = [], [], []
    for instruction, siblings, count, fused in _executed(computations, entry, 1, False):
        product = _product(instruction, siblings, count)
        collective = _collective(instruction, siblings, count)
        if count == 0 and (product or collective):
            raise ValueError(f"{instruction.name} is in a while loop whose trip count XLA does not know: not countable")
        if collective:
            collectives.append(collective)
        if not fused and instruction.opcode not in _FREE:
            launches.append([instruction, siblings, count, 0])
        if product:
            products.append(product)
            launches[-1][-1] += product.flops  # a fusion comes right before what is inside it
    kernels = tuple(
        Kernel(i.name, i.opcode, _target(i), count, flops, _traffic(i, siblings, computations), _scope(i))
        for i, siblings, count, flops in launches
    )
    return Program(tuple(products), tuple(collectives), kernels)


def shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and dimensions of every array in a printed shape: `(bf16[8,4]{1,0}, s32[])` -> two."""
    return [
        (t, tuple(int(d) for d in dims.split(",") if d)) for t, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
    ]


def bytes_of(shape: str) -> int:
    """Bytes of the arrays in a printed shape."""
    return sum(math.prod(dims) * _bits(kind) for kind, dims in shapes(shape)) // 8


Computation = dict[str, Instruction]


def _computations(text: str) -> tuple[dict[str, Computation], str]:
    """Every computation by name, and the name of the entry."""
    found: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = found.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    return found, entry


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    at = head.end()
    end = _closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    # A tuple's closing bracket, or the space after an array's layout, comes before the opcode.
    opening = line.index("(", end)
    closing = _closing(line, opening)
    operands = tuple(re.findall(r"%([\w.\-]+)", line[opening:closing]))
    return Instruction(
        head[2], line[at:end], line[end:opening].strip(), operands, line[closing + 1 :], head[1] is not None
    )


def _closing(line: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(line)):
        depth += (line[at] == "(") - (line[at] == ")")
        if depth == 0:
            return at
    raise ValueError(f"unbalanced brackets in HLO: {line[:120]}")


def _executed(
    computations: dict[str, Computation], name: str, count: int, fused: bool
) -> Iterator[tuple[Instruction, Computation, int, bool]]:
    """Every instruction that runs, its computation, how often, and whether it is inside a fusion.

    A count of 0 marks a loop of unknown trip count.
    """
    siblings = computations[name]
    for instruction in siblings.values():
        yield instruction, siblings, count, fused
        opcode, rest = instruction.opcode, instruction.rest
        if opcode == "while":
            times = int(_first(r'"known_trip_count":\{"n":"(\d+)"\}', rest) or 0)
            yield from _executed(computations, _first(r"body=%([\w.\-]+)", rest), count * times, fused)
        elif opcode == "fusion":
            yield from _executed(computations, _first(r"calls=%([\w.\-]+)", rest), count, True)
        elif opcode in ("call", "async-start"):
            yield from _executed(computations, _first(r"(?:to_apply|calls)=%([\w.\-]+)", rest), count, fused)
        elif opcode == "conditional":
            for branch in _branches(rest):
                yield from _executed(computations, branch, count, fused)


def _branches(rest: str) -> list[str]:
    listed = _first(r"branch_computations=\{([^}]*)\}", rest)
    if listed:
        return re.findall(r"%([\w.\-]+)", listed)
    return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", rest)


def _product(instruction: Instruction, siblings: Computation, count: int) -> Product | None:
    target = _target(instruction)
    if instruction.opcode == "dot":
        contracting = _first(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    elif target.startswith("__cublas$"):
        contracting = _first(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest).replace('"', "")
    elif instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution(instruction, siblings, count)
    else:
        return None
    lhs, rhs, result = _operand_and_result_shapes(instruction, siblings)
    depth = math.prod(lhs[int(axis)] for axis in contracting.split(",") if axis)
    return Product(
        target or instruction.opcode, (lhs, rhs, result), count, 2 * math.prod(result) * depth, _scope(instruction)
    )


def _convolution(instruction: Instruction, siblings: Computation, count: int) -> Product:
    """2 x results x kernel elements without the output features; zeros that dilate the input are no work."""
    lhs, kernel, result = _operand_and_result_shapes(instruction, siblings)
    labels = _first(r"dim_labels=\w+_(\w+)->\w+", instruction.rest)
    dilation = math.prod(int(n) for n in _first(r"lhs_dilate=([\dx]+)", instruction.rest).split("x") if n)
    work = 2 * math.prod(result) * math.prod(kernel) // kernel[labels.index("o")] // dilation
    return Product("convolution", (lhs, kernel, result), count, work, _scope(instruction))


def _operand_and_result_shapes(instruction: Instruction, siblings: Computation) -> tuple[tuple[int, ...], ...]:
    """Dimensions of the first two operands and of the result; a library call's workspace comes after the result."""
    printed = (siblings[instruction.operands[0]].shape, siblings[instruction.operands[1]].shape, instruction.shape)
    return tuple(shapes(text)[0][1] for text in printed)


def _collective(instruction: Instruction, siblings: Computation, count: int) -> Collective | None:
    """A synchronous collective, or an asynchronous one at its `-done`, whose result is the collective's alone."""
    kind = instruction.opcode.removesuffix("-done")
    if kind not in COLLECTIVES:
        return None
    start = siblings[instruction.operands[0]] if instruction.opcode.endswith("-done") else instruction
    types = tuple(sorted({kind for kind, _ in shapes(instruction.shape)}))
    group = 2 if kind == "collective-permute" else _group(start.rest)
    return Collective(kind, types, bytes_of(instruction.shape), group, count, _scope(start))


def _group(rest: str) -> int:
    """Devices in one replica group, in any of the ways in which XLA prints groups."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(listed[1].split(","))
    raise ValueError(f"replica groups are printed in a way that is not known: {rest[:160]}")


def _traffic(instruction: Instruction, siblings: Computation, computations: dict[str, Computation]) -> int:
    """Bytes that one run of a kernel reads and writes."""
    opcode = instruction.opcode
    if opcode.removesuffix("-start") in COLLECTIVES:
        return 0
    if opcode == "fusion":
        inside = computations[_first(r"calls=%([\w.\-]+)", instruction.rest)]
        root = next(i for i in inside.values() if i.root)
        results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
        parameters = [i for i in inside.values() if i.opcode == "parameter"]
        return sum(_read(i, inside) for i in parameters) + sum(_written(i, inside) for i in results)
    if opcode in _SLICES:
        return 2 * _written(instruction, siblings)
    read = sum(bytes_of(siblings[name].shape) for name in instruction.operands)
    # The last result of a library call is its workspace.
    workspace = re.search(r", (s8\[\d+\])[^,]*\)$", instruction.shape) if opcode == "custom-call" else None
    return read + bytes_of(instruction.shape) - (bytes_of(workspace[1]) if workspace else 0)


_SLICES = ("dynamic-slice", "dynamic-update-slice", "gather", "slice")


def _read(value: Instruction, inside: Computation) -> int:
    """Bytes of a fusion's parameter that are read: all, or only the slices that are taken of it."""
    total = 0
    for user in (i for i in inside.values() if value.name in i.operands):
        if user.opcode == "bitcast":
            total += _read(user, inside)
        elif user.opcode in _SLICES and user.operands[0] == value.name:
            total += 0 if user.opcode == "dynamic-update-slice" else bytes_of(user.shape)
        else:
            return bytes_of(value.shape)
    return min(total, bytes_of(value.shape))


def _written(result: Instruction, inside: Computation) -> int:
    """Bytes that a result writes: of an update in place, the update."""
    while result.opcode == "bitcast":
        result = inside[result.operands[0]]
    return bytes_of(inside[result.operands[1]].shape if result.opcode == "dynamic-update-slice" else result.shape)


def _target(instruction: Instruction) -> str:
    return _first(r'custom_call_target="([^"]*)"', instruction.rest)


def _scope(instruction: Instruction) -> str:
    return _first(r'op_name="([^"]*)"', instruction.rest)


def _bits(kind: str) -> int:
    """Bits of an element type: `bf16` 16, `f8e4m3fn` 8, `pred` 8 (a byte each in memory)."""
    digits = re.match(r"[a-z]+(\d+)", kind)
    return int(digits[1]) if digits else {"pred": 8}.get(kind, 0)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""
