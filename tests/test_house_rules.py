"""Does the source keep the rules that a search can check, and would each rule notice a breach?"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = (
    "cuflash",
    "kernels_cu",
    "tests",
    "tools",
    "examples",
    "benchmarks",
    "docs",
    ".ci",
)
#: The file that calls other implementations of attention.
PEERS = "benchmarks/peers.py"
CUDA = (".cu", ".cuh", ".h")
TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".yaml", ".sh", *CUDA}

Files = dict[str, str]  # path relative to the root -> text
Breaches = Iterator[str]


def project_files() -> Files:
    """Read every source and documentation file of the checkout."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in SOURCE_FOLDERS:
        paths += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
    }


def select(files: Files, folders: tuple[str, ...], suffixes: tuple[str, ...]) -> Files:
    """Keep the files of some folders ("" is the root) and suffixes."""
    return {
        path: text
        for path, text in files.items()
        if path.endswith(suffixes) and (path.split("/")[0] if "/" in path else "") in folders
    }


def python_files(files: Files) -> Files:
    """Keep Python except this file, which holds the breaches that the rules are tested on."""
    chosen = select(files, ("", *SOURCE_FOLDERS), (".py",))
    return {path: text for path, text in chosen.items() if path != "tests/test_house_rules.py"}


def kernel_files(files: Files) -> Files:
    """Keep the CUDA sources that are shipped."""
    return select(files, ("kernels_cu",), CUDA)


def cuda_files(files: Files) -> Files:
    """Keep CUDA probes of tests and benchmarks, too: no kernels, but subject to the same rules."""
    return select(files, ("kernels_cu", "tests", "benchmarks"), CUDA)


def lines_with(pattern: str, text: str) -> Iterator[int]:
    """Yield the numbers of the lines in which a pattern is found."""
    for match in re.finditer(pattern, text):
        yield text.count("\n", 0, match.start()) + 1


def code_only(cuda: str) -> str:
    """Blank out comments and string contents of CUDA text; line numbers stay."""
    token = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'

    def blank(match: re.Match[str]) -> str:
        if match[0].startswith('"'):
            return '""'
        return "\n" * match[0].count("\n")

    return re.sub(token, blank, cuda, flags=re.DOTALL)


# --- the rules ---------------------------------------------------------------------------------


def asm_only_in_ptx(files: Files) -> Breaches:
    for path, text in cuda_files(files).items():
        if not path.startswith("kernels_cu/ptx/"):
            for line in lines_with(r"\b(__)?asm(__)?\b", code_only(text)):
                yield f"{path}:{line}: asm belongs into kernels_cu/ptx/"


def macros_only_in_config(files: Files) -> Breaches:
    for path, text in cuda_files(files).items():
        if path == "kernels_cu/config.cuh":
            continue
        # Text in asm gets types and numbers of registers only by macros.
        allowed = "(?!PTX_|DEVICE)" if path.startswith("kernels_cu/ptx/") else "(?!DEVICE)"
        for line in lines_with(rf"\bCUFLASH_{allowed}", code_only(text)):
            yield f"{path}:{line}: only config.cuh reads CUFLASH_ macros"


def no_conditional_compilation(files: Files) -> Breaches:
    for path, text in kernel_files(files).items():
        code = code_only(text)
        for match in re.finditer(r"^[ \t]*#[ \t]*(\w+)(.*)", code, flags=re.MULTILINE):
            directive, rest = match[1], match[2].strip()
            default = path == "kernels_cu/config.cuh" and re.match(r"CUFLASH_\w+", rest)
            ptx = path.startswith("kernels_cu/ptx/") and rest.startswith("CUFLASH_PTX_")
            if directive in ("include", "pragma", "endif", "undef"):
                continue
            if directive in ("ifndef", "define") and (default or ptx):
                continue
            line = code.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: #{directive}: write if constexpr (Config::...)"
        for line in lines_with(r"__CUDA_ARCH__", code):
            yield f"{path}:{line}: the architecture is a field of the config"


def no_cuda_in_python_strings(files: Files) -> Breaches:
    cuda = re.compile(
        r"__global__|__device__|__shared__|threadIdx|blockIdx|extern\s+\"C\"|asm\s*\("
    )
    for path, text in python_files(files).items():
        if path.startswith("tools/gen_"):  # writes a checked-in header
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                value = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                if cuda.search(value):
                    yield f"{path}:{node.lineno}: CUDA belongs into .cu and .cuh files"


# Each thing has one spelling. The names of other libraries would be a second one.
FOREIGN_NAMES = {
    "Bc": "block_n",
    "Br": "block_m",
    "CTA_KV": "block_n",
    "CTA_Q": "block_m",
    "attn_bias": "bias",
    "attn_mask": "mask",
    "d_head": "head_dim",
    "dP_sum": "delta",
    "dPsum": "delta",
    "dsoftmax_sum": "delta",
    "headdim": "head_dim",
    "is_causal": "causal",
    "is_local": "window",
    "kBlockM": "block_m",
    "kBlockN": "block_n",
    "kHeadDim": "head_dim",
    "logit_cap": "softcap",
    "logits_soft_cap": "softcap",
    "n_heads": "num_heads_q",
    "nheads": "num_heads_q",
    "nheads_k": "num_heads_kv",
    "num_kv_heads": "num_heads_kv",
    "qhead_per_khead": "group_size",
    "seq_len_k": "seqlen_k",
    "seq_len_q": "seqlen_q",
    "seqlen_kv": "seqlen_k",
    "sm_scale": "scale",
    "softmax_lse": "lse",
    "tPsP": "p_smem",
    "tSrQ": "q_frag",
    "window_size": "window",
}


def identifiers(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every identifier in a Python or CUDA file."""
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            for attribute in ("id", "arg", "attr", "name"):
                name = getattr(node, attribute, None)
                if isinstance(name, str):
                    yield getattr(node, "lineno", 0), name
    else:
        code = code_only(text)
        for match in re.finditer(r"[A-Za-z_]\w*", code):
            yield code.count("\n", 0, match.start()) + 1, match[0]


def names_of_the_field(files: Files) -> Breaches:
    # A file that calls other libraries uses their names.
    ours = {path: text for path, text in python_files(files).items() if path != PEERS}
    for path, text in {**ours, **cuda_files(files)}.items():
        for line, name in identifiers(path, text):
            if name in FOREIGN_NAMES:
                yield f"{path}:{line}: {name}: say {FOREIGN_NAMES[name]}"


def files_named_after_what_they_hold(files: Files) -> Breaches:
    empty = {"utils", "util", "common", "helpers", "helper", "misc", "new", "old", "opt", "legacy"}
    for path in files:
        for part in path.split("/"):
            words = re.split(r"[_.\-]", part.lower())
            for word in words:
                if word in empty or re.fullmatch(r"v\d+", word):
                    yield f"{path}: '{word}' does not say what the file holds"


def no_output_from_kernels(files: Files) -> Breaches:
    for path, text in cuda_files(files).items():
        for line in lines_with(r"\b(printf|assert|std::cout)\b", code_only(text)):
            yield f"{path}:{line}: a kernel prints nothing"


def no_open_marks(files: Files) -> Breaches:
    for path, text in files.items():
        if path != "tests/test_house_rules.py":
            for line in lines_with(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))", text):
                yield f"{path}:{line}: an open end names its issue: (#123)"


def no_commented_out_cuda(files: Files) -> Breaches:
    statement = r"[\w:<>,&*\[\].]+( [\w\[\]]+)?(\(.*\)| [-+*|&]?= .*);"
    code = rf"(?m)^\s*//\s*((if|for) \(.*\) \{{|{statement})\s*$"
    for path, text in cuda_files(files).items():
        for line in lines_with(code, text):
            yield f"{path}:{line}: code in a comment: git remembers it"


def no_assert_for_users(files: Files) -> Breaches:
    for path, text in select(files, ("cuflash",), (".py",)).items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assert):
                yield f"{path}:{node.lineno}: raise an exception that names the argument"


def static_assertions_say_why(files: Files) -> Breaches:
    for path, text in cuda_files(files).items():
        code = code_only(text)
        for match in re.finditer(r"\bstatic_assert\s*\(", code):
            depth, end = 1, match.end()
            while depth and end < len(code):
                depth += {"(": 1, ")": -1}.get(code[end], 0)
                end += 1
            if not re.search(r",\s*(\"\"\s*)+\)$", code[match.start() : end]):
                line = code.count("\n", 0, match.start()) + 1
                yield f"{path}:{line}: a static assertion has a sentence"


def barriers_say_why(files: Files) -> Breaches:
    for path, text in cuda_files(files).items():
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if re.search(r"__syncthreads\w*\s*\(", line.split("//")[0]):
                above = lines[number - 1].strip() if number else ""
                if "//" not in line and not above.startswith("//"):
                    yield f"{path}:{number + 1}: which memory does this barrier protect?"


def no_using_namespace_in_headers(files: Files) -> Breaches:
    for path, text in select(files, ("kernels_cu", "tests"), (".cuh", ".h")).items():
        for line in lines_with(r"\busing\s+namespace\b", code_only(text)):
            yield f"{path}:{line}: write the namespace"


def entry_points_only_in_cu(files: Files) -> Breaches:
    for path, text in kernel_files(files).items():
        code = code_only(text)
        kernels = list(lines_with(r"\b__global__\b", code))
        if not path.endswith(".cu"):
            for line in kernels:
                yield f"{path}:{line}: a header is no entry point"
        elif len(kernels) != 1:
            yield f"{path}: one .cu file is one kernel, not {len(kernels)}"
        elif not re.search(r'extern ""\s+__global__.*?\bcuflash_\w+\s*\(', code, flags=re.DOTALL):
            yield f'{path}: the kernel is extern "C" and named cuflash_...'


def scores_exactly_once(files: Files) -> Breaches:
    """Options of a score are read where scores are defined, and by no kernel."""
    option = (
        r"\bConfig::(causal|window\w*|softcap|bias|mask|alibi\w*|sink|segment\w*|offset"
        r"|\w+lengths)\b"
    )
    owners = {
        "kernels_cu/config.cuh",
        "kernels_cu/score/score.cuh",
        "kernels_cu/score/seqlen.cuh",
        "kernels_cu/score/traits.cuh",
    }
    for path, text in kernel_files(files).items():
        if path not in owners:
            for line in lines_with(option, code_only(text)):
                yield f"{path}:{line}: ask score/score.cuh"


def numbers_have_names(files: Files) -> Breaches:
    constants = {"kernels_cu/numeric.cuh", "kernels_cu/score/exp64.cuh"}  # a table and a polynomial
    for path, text in cuda_files(files).items():
        if path not in constants:
            for line in lines_with(r"\b\d*\.\d{4,}|\b\d+(\.\d*)?e-\d\d", code_only(text)):
                yield f"{path}:{line}: a magic number: name it in numeric.cuh"


def kernel_text_is_tidy(files: Files) -> Breaches:
    for path, text in cuda_files(files).items():
        if not text.startswith("//"):
            yield f"{path}:1: the first line says what the file holds"
        for number, line in enumerate(text.splitlines(), start=1):
            long = len(line) > 100 and not re.fullmatch(r"// https://\S+", line)
            if long or "\t" in line or line != line.rstrip():
                yield f"{path}:{number}: 100 columns, no tabs, no trailing blanks"


ALLOWED_IMPORTS = {"numpy", "ml_dtypes", "cuflash", "cupy", "cupy_backends", "cuda"}
#: Packages that an extra installs, or that users install: file -> packages only it may import.
OPTIONAL_IMPORTS = {
    PEERS: {"torch", "flash_attn"},
    "benchmarks/accuracy.py": {"matplotlib", "support"},
    "benchmarks/float8.py": {"support"},
    "benchmarks/method_pictures.py": {"matplotlib"},
    "benchmarks/sweep_pictures.py": {"matplotlib"},
    "benchmarks/points.py": {"torch", "pykeops"},
    "cuflash/_cli/from_checkout.py": {"benchmarks"},
    "cuflash/_host/cores.py": {"threadpoolctl"},  # a dependency, for this file alone
    "benchmarks/cpu.py": {"threadpoolctl"},
    "cuflash/testing/_strategies.py": {"hypothesis"},
    "cuflash/_results.py": {"typing_extensions"},  # for type checkers, which install it
    "cuflash/tuning/_strategies.py": {"kernel_tuner"},
}


def few_dependencies(files: Files) -> Breaches:
    for path, text in select(files, ("cuflash", "benchmarks"), (".py",)).items():
        known = ALLOWED_IMPORTS | OPTIONAL_IMPORTS.get(path, set())
        known |= {"benchmarks"} if path.startswith("benchmarks/") else set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "cuflash"]
            else:
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if called.split(".")[-1] in ("import_module", "__import__") and path != PEERS:
                    yield f"{path}:{node.lineno}: write an import statement"
                continue
            for name in (name.split(".")[0] for name in names):
                if name not in known and name not in sys.stdlib_module_names:
                    yield f"{path}:{node.lineno}: {name} is no dependency"


def files_answer_one_question(files: Files) -> Breaches:
    """A file has at most 450 lines of code; documentation is not counted."""
    for path, text in select(files, ("cuflash", "benchmarks"), (".py",)).items():
        tree = ast.parse(text)
        documentation: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    documentation |= set(range(first.lineno, (first.end_lineno or 0) + 1))
        lines = text.splitlines()
        code = {
            number
            for number, line in enumerate(lines, start=1)
            if line.strip() and not line.strip().startswith("#") and number not in documentation
        }
        if len(code) > 450:
            yield f"{path}: {len(code)} lines of code, 450 are the limit"
    for path, text in cuda_files(files).items():
        length = sum(bool(line.strip()) for line in code_only(text).splitlines())
        if length > 450:
            yield f"{path}: {length} lines of code, 450 are the limit"


#: Limit for the lines of all tests of scripts, which import a script at their beginning: 7,087
#: before the host was rebuilt (7,934 with tests of kernels that borrow a function of a script).
LINES_OF_SCRIPT_TESTS = 4_500
PLUGINS = {"tests/gpu_report.py", "tests/gpu_watchdog.py"}
#: Tests that import a script but test something else.
OF_SOMETHING_ELSE = {
    "tests/test_toy_option.py": "the library",
    "tests/test_tuning_document.py": "documents",
}


def scripts_of(text: str, files: Files) -> set[str]:
    """Return the files of tools/, examples/, benchmarks/ and pytest plugins that a test imports."""
    found = set()
    for node in ast.parse(text).body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        for name in names:
            path = name.replace(".", "/") + ".py"
            found |= {f"tools/{path}", f"examples/{path}", path} & files.keys()
            found |= {f"tests/{path}"} & files.keys() & PLUGINS
    return {path for path in found if not path.startswith("cuflash/")}


def few_lines_test_scripts(files: Files) -> Breaches:
    """Tests of a script are no longer than the script, and all together have a limit of lines."""
    total = 0
    for path, text in select(files, ("tests",), (".py",)).items():
        scripts = scripts_of(text, files) if path.startswith("tests/test_") else ()
        lines = text.count("\n") if scripts else 0
        most = sum(files[script].count("\n") for script in scripts)
        if lines > most and path not in OF_SOMETHING_ELSE:
            yield f"{path}: {lines} lines, {', '.join(sorted(scripts))} have {most}"
        total += lines
    if total > LINES_OF_SCRIPT_TESTS:
        yield f"tests of scripts have {total} lines, {LINES_OF_SCRIPT_TESTS} are the limit"


def documented_files_exist(files: Files) -> Breaches:
    """A file named in the documentation exists, under that path or as the end of a path."""
    name = r"(?<![\w/<>*{}.\-])((?:[\w.\-]+/)*[\w\-]+\.(?:py|cu|cuh|md|toml|json))(?![\w/*{}])"
    documents = select(files, ("", "docs", "kernels_cu", "benchmarks", "examples"), (".md",))
    for path, text in documents.items():
        if path.startswith(("CHANGELOG.md", "benchmarks/results/")):  # they tell of the past
            continue
        text = re.sub(r"\w+://\S+", "", text)
        for match in re.finditer(name, text):
            mention = match[1].removeprefix("./")
            while mention.startswith("../"):
                mention = mention[3:]
            everywhere = [*files, *existing_data_files()]
            if not any(f"/{known}".endswith(f"/{mention}") for known in everywhere):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{path}:{line}: {mention} does not exist"


def existing_data_files() -> list[str]:
    """Return the names of files that documentation may mention, though they are not read here."""
    return [
        path.relative_to(ROOT).as_posix()
        for folder in ("tests", "benchmarks", "docs", "cuflash")
        for path in (ROOT / folder).rglob("*.json")
    ]


def plain_documents(files: Files) -> Breaches:
    for path, text in select(files, ("", *SOURCE_FOLDERS), (".md", ".py", *CUDA)).items():
        for line in lines_with("[\U0001f300-\U0001faff\u2600-\u26ff\u2705\u2728\u274c]", text):
            yield f"{path}:{line}: no pictograms"


@dataclass(frozen=True)
class Rule:
    """A rule, texts that break it (each on its own), and texts that only seem to break it."""

    check: Callable[[Files], Breaches]
    bad: tuple[Files, ...]
    good: tuple[Files, ...] = field(default=())


RULES = [
    Rule(
        asm_only_in_ptx,
        bad=(
            {"kernels_cu/forward_sm80.cu": '// x\nasm volatile("ret;");\n'},
            {"kernels_cu/tile/load.cuh": '__asm__("ret;");'},
            {"tests/support/probe.cu": 'asm("ret;");'},
        ),
        good=(
            {"kernels_cu/ptx/mma_sync.cuh": 'asm("ret;");'},
            {"kernels_cu/a.cuh": '// asm lives in ptx/\nstatic_assert(true, "no asm here");'},
        ),
    ),
    Rule(
        macros_only_in_config,
        bad=(
            {"kernels_cu/score/score.cuh": "int d = CUFLASH_HEAD_DIM;"},
            {"kernels_cu/ptx/tma.cuh": "int d = CUFLASH_HEAD_DIM;"},
            {"kernels_cu/tile/load.cuh": "int d = CUFLASH_PTX_DTYPE;"},
            {"tests/support/probe.cu": "int d = CUFLASH_HEAD_DIM;"},
        ),
        good=(
            {"kernels_cu/config.cuh": "int d = CUFLASH_HEAD_DIM;"},
            {"kernels_cu/ptx/wgmma.cuh": 'asm("wgmma." CUFLASH_PTX_DTYPE);'},
            {"kernels_cu/score/score.cuh": "// not CUFLASH_HEAD_DIM"},
        ),
    ),
    Rule(
        no_conditional_compilation,
        bad=(
            {"kernels_cu/score/score.cuh": "#if 1\n#endif"},
            {"kernels_cu/score/score.cuh": "  #  ifdef CAUSAL\n#endif"},
            {"kernels_cu/config.cuh": "#if CUFLASH_HEAD_DIM > 64\n#endif"},
            {"kernels_cu/numeric.cuh": "#define MAX(a, b) a"},
            {"kernels_cu/numeric.cuh": "constexpr int arch = __CUDA_ARCH__;"},
        ),
        good=(
            {"kernels_cu/config.cuh": "#ifndef CUFLASH_A\n#define CUFLASH_A 1\n#endif"},
            {"kernels_cu/score/score.cuh": '#pragma once\n#include "config.cuh"\n#pragma unroll\n'},
        ),
    ),
    Rule(
        no_cuda_in_python_strings,
        bad=(
            {"cuflash/_jit/compilation.py": "source = '__global__ void f() {}'"},
            {"tests/test_score.py": "s = f'{1} threadIdx.x'"},
            {"tools/probe.py": "s = b'extern \"C\" void f();'"},
        ),
        good=(
            {"cuflash/_jit/compilation.py": "# __global__\ns = '#define CUFLASH_HEAD_DIM 64'"},
            {"tools/gen_score_params.py": "s = '__device__ void f();'"},
        ),
    ),
    Rule(
        names_of_the_field,
        bad=(
            {"cuflash/_api/attention.py": "def attention(q, attn_mask): ..."},
            {"cuflash/_api/attention.py": "attention(q, is_causal=True)"},
            {"examples/a.py": "kBlockM = 1"},
            {"kernels_cu/score/score.cuh": "float sm_scale;"},
            {"tests/support/host_cuda.h": "float sm_scale;"},
        ),
        good=(
            {"cuflash/_api/attention.py": "'''Called attn_mask elsewhere.'''\nmask = 'is_causal'"},
            {"kernels_cu/score/score.cuh": "float scale;  // sm_scale elsewhere"},
            {PEERS: "f(is_causal=True)"},
        ),
    ),
    Rule(
        files_named_after_what_they_hold,
        bad=(
            {"cuflash/_utils.py": ""},
            {"kernels_cu/forward_v2.cu": ""},
            {"tests/common/x.py": ""},
            {"docs/legacy-notes.md": ""},
        ),
        good=(
            {"cuflash/_problem/options.py": "", "kernels_cu/ptx/wgmma.cuh": "", "a/renewal.py": ""},
        ),
    ),
    Rule(
        no_output_from_kernels,
        bad=(
            {"kernels_cu/forward_sm80.cu": 'printf("%d", x);'},
            {"tests/support/probe.cu": "assert(x);"},
        ),
        good=({"kernels_cu/score/score.cuh": "static_assert(true);  // no printf"},),
    ),
    Rule(
        no_open_marks,
        bad=(
            {"cuflash/_host/attention.py": "# TODO: later"},
            {"docs/a.md": "FIXME"},
            {"kernels_cu/a.cu": "// XXX"},
        ),
        good=({"cuflash/_host/attention.py": "# TODO(#12): later\ntodos = 1"},),
    ),
    Rule(
        no_commented_out_cuda,
        bad=(
            {"kernels_cu/a.cu": "  // load_tile(q, 0);"},
            {"kernels_cu/a.cu": "// float x = 0.0f;"},
            {"kernels_cu/a.cu": "// acc += p * v;"},
            {"kernels_cu/a.cu": "// if (row < 3) {"},
            {"tests/support/probe.cu": "// float x = 0.0f;"},
        ),
        good=(
            {"kernels_cu/a.cu": "// thread holds rows r and r + 8; both are finite"},
            {"kernels_cu/a.cu": "int x = 0;  // x = 1 in the tail;"},
            {"kernels_cu/a.cu": "// for every key block:\n//   m' = 0;  s = q k^T    registers"},
        ),
    ),
    Rule(
        no_assert_for_users,
        bad=({"cuflash/_problem/problem.py": "def f(x):\n    assert x, 'no'\n"},),
        good=({"cuflash/_problem/problem.py": "'''assert'''", "tests/test_a.py": "assert True"},),
    ),
    Rule(
        static_assertions_say_why,
        bad=(
            {"kernels_cu/a.cuh": "static_assert(sizeof(int) == 4);"},
            {"kernels_cu/a.cuh": 'static_assert(f(1, 2) == 4); // "why"'},
            {"tests/support/host_cuda.h": "static_assert(sizeof(int) == 4);"},
        ),
        good=(
            {"kernels_cu/a.cuh": 'static_assert(f(1, 2) == 4, "as Python believes");'},
            {"kernels_cu/a.cuh": 'static_assert(\n    f(1) == 4,\n    "two "\n    "lines");'},
        ),
    ),
    Rule(
        barriers_say_why,
        bad=(
            {"kernels_cu/a.cu": "f();\n__syncthreads();\ng();"},
            {"tests/support/probe.cu": "f();\n__syncthreads();\ng();"},
        ),
        good=(
            {"kernels_cu/a.cu": "__syncthreads();  // k_smem is complete"},
            {"kernels_cu/a.cu": "// v_smem may be overwritten\n__syncthreads();"},
        ),
    ),
    Rule(
        no_using_namespace_in_headers,
        bad=(
            {"kernels_cu/a.cuh": "using namespace cuflash;"},
            {"tests/support/host_cuda.h": "using namespace std;"},
        ),
    ),
    Rule(
        entry_points_only_in_cu,
        bad=(
            {"kernels_cu/a.cuh": 'extern "C" __global__ void cuflash_a() {}'},
            {"kernels_cu/a.cu": "// nothing"},
            {"kernels_cu/a.cu": "__global__ void cuflash_a() {}"},
            {"kernels_cu/a.cu": 'extern "C" __global__ void forward() {}'},
            {"kernels_cu/a.cu": 'extern "C" __global__ void cuflash_a() {}\n' * 2},
        ),
        good=(
            {
                "kernels_cu/a.cu": 'extern "C" __global__ void __launch_bounds__(128)\n'
                "cuflash_a(const __grid_constant__ Params params) {}"
            },
        ),
    ),
    Rule(
        scores_exactly_once,
        bad=(
            {"kernels_cu/forward_sm80.cu": "if constexpr (Config::window_left) {"},
            {"kernels_cu/tile/matmul_sm80.cuh": "Config::bias"},
            {"kernels_cu/score/softmax.cuh": "if constexpr (Config::kv_lengths != Dtype::none) {"},
        ),
        good=(
            {"kernels_cu/score/score.cuh": "Config::softcap", "kernels_cu/a.cu": "Config::block_m"},
        ),
    ),
    Rule(
        numbers_have_names,
        bad=(
            {"kernels_cu/a.cu": "float scale = 0.08838834764f;"},
            {"kernels_cu/score/softmax.cuh": "sum = max(sum, 1e-30f);"},
            {"tests/support/probe.cu": "sum = max(sum, 1e-30f);"},
        ),
        good=({"kernels_cu/numeric.cuh": "1.4426950408889634f", "kernels_cu/a.cu": "0.5f"},),
    ),
    Rule(
        kernel_text_is_tidy,
        bad=(
            {"kernels_cu/a.cu": "#pragma once\n"},
            {"kernels_cu/a.cu": "// a\n" + "x" * 101},
            {"kernels_cu/a.cu": "// a\n\tint x;"},
            {"kernels_cu/a.cu": "// a \n"},
            {"tests/support/probe.cu": "// a\n" + "x" * 101},
        ),
        good=(
            {"kernels_cu/a.cu": "// a\n" + "x" * 100},
            {"kernels_cu/a.cu": "// a\n// https://" + "x" * 100},
        ),
    ),
    Rule(
        few_dependencies,
        bad=(
            {"cuflash/_a.py": "import torch"},
            {PEERS: "import jax"},
            {"cuflash/tuning/_a.py": "from benchmarks import peers"},
            {"cuflash/_a.py": "from scipy import special"},
            {"cuflash/_a.py": "def f():\n    import jinja2"},
            {"cuflash/_a.py": "import importlib\nimportlib.import_module('torch')"},
            {"cuflash/_a.py": "from importlib import import_module\nimport_module('torch')"},
            {"cuflash/_a.py": "__import__('torch')"},
        ),
        good=(
            {"cuflash/_a.py": "import os\nimport numpy as np\nfrom cuflash import _host"},
            {"cuflash/_a.py": "def f():\n    import cupy"},
            {PEERS: "from benchmarks import report\ndef f():\n    import torch"},
            {"cuflash/_a.py": "from importlib import metadata\nmetadata.version('torch')"},
        ),
    ),
    Rule(
        files_answer_one_question,
        bad=(
            {"cuflash/_a.py": "x = 1\n" * 451},
            {"kernels_cu/a.cu": "int x;\n" * 451},
            {"tests/support/probe.cu": "int x;\n" * 451},
        ),
        good=(
            {"cuflash/_a.py": "def f():\n    '''\n" + "text\n" * 500 + "    '''\n    return 1\n"},
            {"kernels_cu/a.cu": "// text\n" * 500},
        ),
    ),
    Rule(
        documented_files_exist,
        bad=(
            {"README.md": "see `cuflash/_missing.py`"},
            {"docs/a.md": "[tests](../tests/test_missing.py)"},
            {"docs/a.md": "`_missing.py` and `setup_env.py`", "tools/setup_env.py": ""},
        ),
        good=(
            {
                "README.md": "`_host/attention.py`, [x](docs/b.md)",
                "cuflash/_host/attention.py": "",
                "docs/b.md": "",
            },
            {"README.md": "https://example.org/a/missing.py results/<device>-<date>.json"},
        ),
    ),
    Rule(
        few_lines_test_scripts,
        bad=(
            *(
                {"tools/a.py": "x\n" * 5_000, "tests/test_a.py": f"{line}\n" + "x = 1\n" * 4_500}
                for line in ("import a", "from a import x")
            ),
            {"benchmarks/a.py": "x\n", "tests/test_b.py": "from benchmarks import a\nx = 1\n"},
            {"benchmarks/a.py": "x\n", "tests/test_b.py": "from benchmarks.a import x\nx = 1\n"},
            {"tests/gpu_report.py": "x\n", "tests/test_b.py": "import gpu_report\nx = 1\n"},
        ),
        good=(
            {"tools/a.py": "", "tests/test_a.py": "from cuflash import a\n" * 6_000},
            {"tools/a.py": "", "tests/test_a.py": "def f():\n    import a\n" + "x = 1\n" * 5_000},
            {"tools/a.py": "x\n" * 9, "tests/test_a.py": "import a\n" + "x = 1\n" * 8},
        ),
    ),
    Rule(plain_documents, bad=({"README.md": "fast \U0001f680"}, {"docs/a.md": "\u2705 done"})),
]


@pytest.fixture(scope="module")
def files() -> Files:
    """Return the files of the whole checkout."""
    return project_files()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_project_keeps_the_rule(rule, files):
    breaches = list(rule.check(files))
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_rule_notices_each_breach(rule):
    missed = [text for text in rule.bad if not list(rule.check(text))]
    assert rule.bad
    assert not missed


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_rule_has_no_false_alarm(rule):
    alarms = [breach for text in rule.good for breach in rule.check(text)]
    assert not alarms


def test_project_is_read(files):
    """The checkout is read: with a wrong root every rule would hold."""
    assert {"pyproject.toml", "cuflash/__init__.py", "tests/test_house_rules.py"} <= set(files)
    assert python_files(files)
    assert kernel_files(files)
    assert {"tests/support/host_cuda.h", "tests/support/score_probe.cu"} <= set(cuda_files(files))
