"""Machine code of the Hopper kernels, disassembled from the library. Needs no GPU."""

import collections
import concurrent.futures
import fcntl
import functools
import importlib.util
import operator
import os
import pathlib
import pickle
import re
import shutil
import subprocess

import pytest
from harness import LIBRARY

import jax_flash

KERNELS = [name for name in jax_flash.build_info()["kernels"] if " sm90 " in name]
pytestmark = pytest.mark.skipif(not KERNELS, reason="the library was built without kernels for Hopper")

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);")
BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")
LOCAL = re.compile(r"\b(LDL|STL)\b")


def disassembler() -> str:
    """CUDA's cuobjdump, from PATH or from its Python package."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and not found else ():
        found = next((str(path) for path in pathlib.Path(root).glob("*/bin/cuobjdump")), None)
        if found:
            break
    if found is None:
        pytest.skip("there is no cuobjdump: it comes with CUDA and with the extra `test`")
    return found


# Kernels that launch_early starts, some of them in files of the portable kernels.
EARLY = re.compile(
    "4sm90.*15backward_kernel|4sm90.*14forward_kernel.*4tf32E|4sm90.*14forward_kernel.*6tf32x3E"
    "|convert_fragments_kernel|combine_kernel"
)
# And one of which blocks that have nothing to do leave without waiting.
BEHIND = re.compile("4sm80.*14forward_kernel.*4tf32E|4sm80.*14forward_kernel.*6tf32x3E")


# Takes about a minute. To disassemble the portable kernels, too, would take three.
@pytest.fixture(scope="module")
def every_function(tmp_path_factory) -> dict[str, list[tuple[int, str]]]:
    """The instructions of each kernel of Hopper's own or started early, with their addresses."""
    # The workers of pytest-xdist have one folder above theirs. The first of them disassembles for all.
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    result = folder / "instructions.pickle"
    with open(folder / "instructions.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_bytes(pickle.dumps(disassemble(tmp_path_factory.mktemp("cubins"))))
        return pickle.loads(result.read_bytes())


def disassemble(folder: pathlib.Path) -> dict[str, list[tuple[int, str]]]:
    tool = disassembler()
    extract = [tool, "--extract-elf", "all", "--gpu-architecture", "sm_90a", str(LIBRARY.resolve())]
    subprocess.run(extract, capture_output=True, cwd=folder, check=True)
    others = re.compile(f"{EARLY.pattern}|{BEHIND.pattern}")
    cubins = [
        path
        for path in folder.iterdir()
        if ".sm_90a." in path.name or others.search(path.read_bytes().decode(errors="replace"))
    ]

    def disassembled(cubin: pathlib.Path) -> dict[str, list[tuple[int, str]]]:
        code = subprocess.run([tool, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout
        return {
            name: [(int(address, 16), text) for address, text in INSTRUCTION.findall(body)]
            for name, body in (part.split("\n", 1) for part in code.split("Function : ")[1:])
        }

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(collections.ChainMap(*pool.map(disassembled, cubins)))


@pytest.fixture(scope="module")
def functions(every_function) -> dict[str, list[tuple[int, str]]]:
    """The kernels with products on warpgroups."""
    return {
        name: code
        for name, code in every_function.items()
        if re.search(r"4sm90.*Config", name) and "decode_kernel" not in name
    }


@pytest.fixture(scope="module")
def loops(functions) -> dict[str, list[list[str]]]:
    """The main loops of each kernel with products."""
    # Of wide heads' dk and dv the innermost loop has one product of a block of queries, the loop around it all.
    return {
        name: main_loops(code, is_nested="wide_backward_kernel" in name) for name, code in functions.items()
    }


def test_ptx_is_embedded():
    """GPUs that no machine code serves compile PTX: each unit has that of the oldest architecture, or its own."""
    command = [disassembler(), "--list-ptx", str(LIBRARY)]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    embedded = [int(capability) for capability in re.findall(r"\.sm_(\d+)\.ptx", files)]
    built = [int(re.match(r"\d+", arch)[0]) for arch in jax_flash.build_info()["archs"].split(";")]
    assert {min(built)} <= set(embedded) <= set(built)
    units = {tuple(name.split()) for name in jax_flash.build_info()["kernels"] if " sm80 " in name}
    assert len(embedded) >= len(units) / 2  # a unit has two arithmetics


def is_product(text: str) -> bool:
    return "HGMMA" in text


def successors(instructions: list[tuple[int, str]]) -> list[list[int]]:
    """For each instruction, those that may follow it."""
    places = {address: i for i, (address, _) in enumerate(instructions)}
    following = []
    for i, (_, text) in enumerate(instructions):
        branch = BRANCH.search(text)
        targets = [places[int(branch[1], 16)]] if branch else []
        if text.startswith("@") or not (branch or re.match(r"(EXIT|RET|BRX|KILL)\b", text)):
            targets.append(i + 1)
        following.append([target for target in targets if target < len(instructions)])
    return following


def main_loops(instructions: list[tuple[int, str]], is_nested: bool = False) -> list[list[str]]:
    """The innermost loops with products: over blocks that need no mask, and one for each form of the general kernel.

    Or, if `is_nested`, the loops around these.

    A loop is a branch back to an instruction that dominates it.
    """
    following = successors(instructions)
    leading = collections.defaultdict(list)
    for i, targets in enumerate(following):
        for target in targets:
            leading[target].append(i)
    dominators = {0: 1}  # for each instruction, as bits of an integer
    changed = True
    while changed:
        changed = False
        for i in range(1, len(instructions)):
            known = [dominators[j] for j in leading[i] if j in dominators]
            if known:
                bits = functools.reduce(operator.and_, known) | 1 << i
                changed |= dominators.get(i) != bits
                dominators[i] = bits

    bodies = collections.defaultdict(set)  # keyed by the first instruction
    for i, targets in enumerate(following):
        for head in targets:
            if i in dominators and dominators[i] >> head & 1:
                todo, body = [i], bodies[head]
                body.add(head)
                while todo:
                    if (j := todo.pop()) not in body:
                        body.add(j)
                        todo += leading[j]
    loops = [body for body in bodies.values() if any(is_product(instructions[i][1]) for i in body)]
    if is_nested:
        loops = [body for body in loops if any(other < body for other in loops)]
    innermost = [body for body in loops if not any(other < body for other in loops)]
    assert innermost
    return [[instructions[i][1] for i in sorted(body)] for body in innermost]


@pytest.mark.exhaustive
def test_every_kernel_is_there(functions):
    # With and without a transformation of the scores; some head dims have two tiles.
    assert len(functions) >= 2 * len(KERNELS)
    for arithmetic in ("bfloat16", "float16"):
        assert any(arithmetic in name for name in functions)


@pytest.mark.exhaustive
def test_products_run_on_warpgroups(functions):
    for name, instructions in functions.items():
        texts = [text for _, text in instructions]
        assert any(map(is_product, texts)), name
        assert not any("HMMA" in text for text in texts), name
        assert any("UTMALDG" in text for text in texts), name


@pytest.mark.exhaustive
def test_decoding_stays_in_registers(every_function):
    """It has products of a warp, and copies by TMA."""
    kernels = [
        code for name, code in every_function.items() if re.search(r"4sm90.*decode_kernel.*Config", name)
    ]
    assert len(kernels) >= 4 * sum(name.startswith("decode sm90 bfloat16") for name in KERNELS)
    for code in kernels:
        texts = [text for _, text in code]
        assert any("HMMA" in text for text in texts)
        assert any("UTMALDG" in text for text in texts)
        assert not any(re.search(r"\b(LDL|STL)\b", text) for text in texts)


@pytest.mark.exhaustive
def test_main_loop_stays_in_registers(loops):
    """But for gradients of planes, which have two operands of ds: up to 16 of 1,089 instructions (head dim 64).

    And for two planes at head dim 128, with options, which have sums of a block beside out, 5 instructions, and for
    their gradients 11 of 1,743; and for wide heads with options, forward, which also have addresses in the other block,
    up to 3 of 987.
    """
    failures = []
    for name, bodies in loops.items():
        are_planes = ("backward_kernel" in name and "tf32" in name) or "tf32x3ELi128" in name
        is_wide = "forward_kernel" in name and "ELi512E" in name
        are_two = "fine_backward" in name and "Li128E" in name
        for loop in bodies:
            spills = sum(bool(LOCAL.search(text)) for text in loop)
            if spills > (0.02 if are_planes else 0.01 if are_two else 0.005 if is_wide else 0) * len(loop):
                failures.append(f"{name}: {spills} of {len(loop)} instructions")
    assert not failures


def waits(name: str) -> set[int]:
    """How often each main loop of a kernel waits for products: a serialised one waits after each instruction."""
    if "fine_backward" in name:  # dout v^T in sums of 64 columns, q k^T, p^T dout and ds^T q in parts, ds k
        return {11 if "Li128E" in name else 4}
    if "forward_kernel" in name:
        return {2}  # for the scores, and for p v
    if "shared_dq" in name:
        return {1}  # ds k
    if "wide_backward_dq" in name:  # one block: ds k_low, q k^T; the other: dout v^T in quarters, ds k_high
        return {2, 5}
    if "wide_backward" in name:
        return {2}  # q k^T, ds^T q; or dout v^T, p^T dout
    if "backward_dq_kernel" in name:
        return {3}  # q k^T, dout v^T, ds k
    if "tangent_kernel" in name:
        return {3}  # q k^T, its tangent, the products with values
    return {5 if re.search(r"ELb1E+v", name) else 4}  # q k^T, dout v^T, p^T dout, ds^T q; with dq also ds k


@pytest.mark.exhaustive
def test_products_are_not_serialised(loops):
    for name, bodies in loops.items():
        counts = {sum("WARPGROUP.DEPBAR" in text for text in loop) for loop in bodies}
        assert counts == waits(name), name


# What reads or writes global memory: loads, stores, atomics, TMA.
GLOBAL = re.compile(r"\b(LDG|STG|LD|ST|ATOM\w*|RED|UTMA\w*|UBLK\w*|UBLKRED|LDGSTS)\b")


def before_wait(instructions: list[tuple[int, str]]) -> list[str]:
    """What may run before the kernel has waited for the one before it, to the wait or a barrier of the block."""
    following, todo, seen = successors(instructions), [0], set()
    while todo:
        i = todo.pop()
        if i in seen or re.search(r"\b(ACQBULK|BAR\.\w+)", instructions[i][1]):
            continue
        seen.add(i)
        todo += following[i]
    return [instructions[i][1] for i in sorted(seen)]


@pytest.mark.exhaustive
def test_early_kernels_wait_before_they_touch_global_memory(every_function):
    early = {name: code for name, code in every_function.items() if EARLY.search(name)}
    for kind in EARLY.pattern.split("|"):
        assert any(re.search(kind, name) for name in early), kind
    for name, instructions in early.items():
        assert any("ACQBULK" in text for _, text in instructions), name
        assert not [text for text in before_wait(instructions) if GLOBAL.search(text)], name


@pytest.mark.exhaustive
def test_the_kernel_behind_planes_writes_nothing_before_it_waits(every_function):
    behind = {name: code for name, code in every_function.items() if BEHIND.search(name)}
    assert behind
    for name, instructions in behind.items():
        assert any("ACQBULK" in text for _, text in instructions), name
        before = [text for text in before_wait(instructions) if GLOBAL.search(text)]
        assert before, name  # whether planes hold the key head
        assert all(re.search(r"\bLDG\b", text) for text in before), name


def test_the_reader_sees_a_load_before_the_wait():
    code = [(0, "@P0 BRA 0x20"), (16, "ACQBULK"), (32, "LDG.E R2, [R4]"), (48, "EXIT")]
    assert "LDG.E R2, [R4]" in before_wait(code)
    assert "LDG.E R2, [R4]" not in before_wait([(0, "MOV R0, R1"), (16, "ACQBULK"), *code[2:]])


def test_the_reader_sees_a_spill():
    code = [(0, "MOV R0, R1"), (16, "HGMMA.64x64x16 R8"), (32, "STL [R1], R2"), (48, "@P0 BRA 0x10")]
    [loop] = main_loops(code)
    assert [text for text in loop if LOCAL.search(text)] == ["STL [R1], R2"]
