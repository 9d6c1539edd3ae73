"""Who may touch what: the arrows between modules, and the few that read or write the page maps."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAPS = {"v2p", "p2v"}
WRITERS = {"ukv_jax/pool.py", "ukv_jax/compaction.py"}
READERS = WRITERS | {"ukv_jax/translator.py", "ukv_jax/verify.py", "ukv_jax/inspect.py"}

# Modules of ukv_jax from the ground up; each may import only from those on lower lines, and from its own.
STOREYS = [
    ["layout"],
    ["cache"],
    ["chain"],
    ["views"],
    ["pool"],
    ["requests", "compaction"],
    ["requests_gpu"],
    ["translator", "verify", "inspect"],
    ["attention"],
    ["models", "sampling"],
    ["loop"],
    ["engine"],
    ["demo", "compare", "plan"],
    ["cli"],
    ["__main__", "__init__"],
]
LEVEL = {name: level for level, names in enumerate(STOREYS) for name in names}


def sources(package: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py"))


def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), path)


def module_of(path: str) -> str:
    """First name below the package: `ukv_jax/attention/mla.py` -> attention."""
    return Path(path).parts[1].removesuffix(".py")


def imports(path: str) -> set[str]:
    """Dotted names that a file imports: `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def map_reads(tree: ast.AST) -> list[int]:
    """Lines that take v2p or p2v out of something: `x.v2p`, getattr(x, "v2p")."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in MAPS)
        or (isinstance(node, ast.Constant) and node.value in MAPS)
    ]


def map_writes(tree: ast.AST) -> list[int]:
    """Lines that make a new v2p or p2v: `x.v2p.at[...]`, a keyword v2p=..., an assignment to x.v2p or to a name v2p."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in MAPS:
            lines.append(node.value.lineno)
        elif isinstance(node, ast.Attribute) and node.attr == "at":
            of = node.value
            if (isinstance(of, ast.Attribute) and of.attr in MAPS) or (
                isinstance(of, ast.Name) and of.id in MAPS
            ):
                lines.append(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr in MAPS and isinstance(node.ctx, ast.Store):
            lines.append(node.lineno)
    return lines


def test_only_pool_and_compaction_write_the_maps():
    for path in sources("ukv_jax"):
        if path not in WRITERS:
            assert not map_writes(parse(path)), f"{path} writes v2p or p2v in lines {map_writes(parse(path))}"


def test_only_the_translator_and_the_checks_read_the_maps():
    for path in sources("ukv_jax"):
        if path not in READERS:
            assert not map_reads(parse(path)), f"{path} reads v2p or p2v in lines {map_reads(parse(path))}"


def test_kernels_that_write_the_maps():
    """In the kernel package only bind_pages makes new maps; others get v2p as an operand."""
    for path in sources("pallas_kernels"):
        if not path.startswith("pallas_kernels/bind_pages/"):
            source = (ROOT / path).read_text().splitlines()
            writes = [n for n in map_writes(parse(path)) if ".at[" in source[n - 1]]
            assert not writes, f"{path} writes v2p or p2v in lines {writes}"


@pytest.mark.parametrize("path", sources("ukv_jax"))
def test_imports_follow_the_arrows(path):
    own = module_of(path)
    assert own in LEVEL, f"{path}: say in STOREYS where it stands"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "ukv_jax":
            continue
        assert len(parts) > 1, f"{path} imports the whole package"
        other = parts[1]
        assert other in LEVEL, f"{path} imports {name}, which stands nowhere"
        assert other == own or LEVEL[other] < LEVEL[own], f"{path} imports {name}: {own} stands below {other}"


def test_models_know_neither_pages_nor_ids():
    for path in sources("ukv_jax/models"):
        below = {name for name in imports(path) if name.split(".")[0] == "ukv_jax"}
        known = {"pool", "requests", "compaction", "translator", "chain"}
        assert not {name for name in below if name.split(".")[1] in known}, f"{path} imports {below}"


@pytest.mark.parametrize("path", sources("pallas_kernels"))
def test_kernels_import_nothing_from_the_library(path):
    assert not {name for name in imports(path) if name.split(".")[0] == "ukv_jax"}


@pytest.mark.parametrize(
    "text, reads, writes",
    [
        ("p = state.v2p[ids]", 1, 0),
        ("p = getattr(state, 'p2v')", 1, 0),
        ("new = replace(pool, v2p=table)", 0, 1),
        ("table = pool.v2p.at[ids].set(3)", 1, 1),
        ("v2p = v2p.at[ids].set(3)", 0, 1),
        ("object.__setattr__(pool, 'v2p', x)", 1, 0),
        ("pool.p2v = x", 1, 1),
        ("x = pool.refs.at[ids].add(1)", 0, 0),
    ],
)
def test_the_scan_sees(text, reads, writes):
    tree = ast.parse(text)
    assert (len(map_reads(tree)), len(map_writes(tree))) == (reads, writes)
