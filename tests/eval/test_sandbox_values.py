"""The verdict rests on plain values: a program passes by its values alone, and no value is lost."""

import array
import collections
import datetime
import decimal
import fractions
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnres.eval import sandbox
from attnres.eval.sandbox import wire

from ..cases import each_once
from .layers import AVAILABLE  # skips where no layer is available

# Programs that try to pass `assert answer(3) == 42` without the answer.
CHEATS = {
    "equal to everything": """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 42
def answer(x): return Yes()""",
    "a number that is equal to everything": """
class Yes(int):
    def __eq__(self, other): return True
def answer(x): return Yes(0)""",
    "a text that is equal to everything": """
class Yes(str):
    def __eq__(self, other): return True
def answer(x): return Yes()""",
    "patched built-ins": """
import builtins
for name in "AssertionError", "Exception", "BaseException": setattr(builtins, name, type(name, (), {}))
builtins.compile = builtins.exec = lambda *args, **kwargs: None
def answer(x): return 41""",
    "patched exception class of assert": """
import builtins
builtins.AssertionError = lambda *args: SystemExit(0)
def answer(x): return 41""",
    "patched guard": """
import gc, sys
for part in list(sys.modules.values()) + [o for o in gc.get_objects() if isinstance(o, dict)]:
    space = part if isinstance(part, dict) else vars(part)
    for name in "check", "encode", "start", "finish", "main":
        if callable(space.get(name)): space[name] = lambda *args, **kwargs: (True, "passed")
def answer(x): return 41""",
    "redefined tests": """
def check(*args): return True, "passed"
tests = namespace = job = None
def answer(x): return 41""",
    "values found up the stack": """
import sys
def answer(x):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if "answer(3) ==" in str(value): return int(str(value).split("==")[1].split()[0])
        frame = frame.f_back
    return 41""",
    "an exception that ends the guard": """
import os, signal
class Stopped(BaseException): pass
def answer(x): raise Stopped("passed")""",
    "no such function": "def other(x): return 42",
    "a syntax error": "def answer(x) return 42",
}


@pytest.mark.parametrize("name", CHEATS)
def test_program_passes_only_by_its_values(name):
    outcome = sandbox.run(CHEATS[name], "assert answer(3) == 42", names=["answer"])
    assert not outcome.passed, outcome
    honest = CHEATS[name] + "\ndef answer(x): return 42"
    if name in ("equal to everything", "redefined tests", "no such function"):
        assert sandbox.run(honest, "assert answer(3) == 42", names=["answer"]).passed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads its own memory there")
@pytest.mark.skipif("landlock" not in AVAILABLE, reason="with namespaces there is no /proc")
def test_memory_of_the_program_holds_no_test(monkeypatch):
    """It is forked before the tests are read, so even a scan of all its memory does not find the expected values."""
    readable = [*sandbox._readable(), "/proc"]
    monkeypatch.setattr(sandbox, "_readable", lambda: readable)
    program = """
def attack(prefix):
    import re
    pattern = re.compile("".join(prefix).encode() + rb"[0-9a-f]{32}")
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line.split()[1]:
                memory.seek(start)
                if found := pattern.search(memory.read(end - start)):
                    return found[0].decode()
    return "nothing"
"""
    call, secret = f"attack({[*'needle-']})", "needle-" + os.urandom(16).hex()

    def run(program: str, tests: str) -> sandbox.Outcome:
        return sandbox.run(program, tests, names=["attack"], layers=("landlock", "seccomp"))

    assert "nothing" in run(program, f"raise ValueError({call})").reason
    assert run(program, f"assert {call} == {secret!r}").reason.startswith("AssertionError")
    # The scan itself works: it finds a value that is in memory.
    assert run(f"{program}\nlocal = {secret!r}", f"assert {call} == {secret!r}").passed


@pytest.mark.parametrize(
    "definition",
    [
        "class sys: getsizeof = lambda x: 41",
        "sys = type('sys', (), {'getsizeof': lambda x: 41})",
        "def sys(): return 1",
    ],
)
def test_program_cannot_replace_modules_in_the_tests(definition):
    program, tests = f"{definition}\ndef size(x): return 41", "assert size('ab') == sys.getsizeof('ab')"
    outcome = sandbox.run(program, tests, names=["size"], modules=["sys"])
    assert outcome.reason.startswith("NameError: name 'sys' is not defined")
    imported = f"import math as sys\n{program.removeprefix(definition)}"  # the tests receive the real module
    assert sandbox.run(imported, tests, names=["size"], modules=["sys"]).reason.startswith("AssertionError")


@pytest.mark.parametrize(
    ("name", "value"),
    each_once(
        ["builtins", "__builtins__", "__name__", "sys", "open", "len", "AssertionError"],
        ["None", "lambda *args: 41", "type('A', (), {})"],
    ),
)
def test_names_that_a_program_binds_anew_change_no_verdict(name, value):
    program = f"def f(x): return x + 1\n{name} = {value}"
    assert sandbox.run(program, "assert f(1) == len('ab')", names=["f"]).passed
    assert not sandbox.run(program, "assert f(1) == len('a')", names=["f"]).passed


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.complex_numbers(allow_nan=False))
    | st.floats(allow_nan=False)
    | st.one_of(st.decimals(allow_nan=False), st.fractions(), st.dates(), st.times(), st.datetimes(), st.timedeltas())
    | st.sampled_from([int, str, float, list, ValueError]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
        | st.sets(st.text() | st.integers() | st.tuples(st.integers(), st.text()))
        | st.frozensets(st.integers())
    ),
    max_leaves=9,
)


@given(plain)
@example(10**6000)
@example(float("inf"))
@example("\udc80 \x00")
@example(range(3, 9, 2))
@example(slice(1, None, 2))
@example(bytearray(b"ab"))
@example(array.array("d", [1.5]))
@example(collections.deque([1, 2], maxlen=3))
@example(collections.Counter("abracadabra"))
@example(collections.defaultdict(list, a=[1]))
@example({(1, 2): {frozenset({3}): [4, (5,)]}})
@example([decimal.Decimal("0.10"), fractions.Fraction(1, 3), datetime.timedelta(1, 2, 3)])
def test_plain_value_arrives_as_it_was(value):
    arrived = wire.decode(wire.unframe(wire.frame(wire.encode(value, pytest.fail))), pytest.fail)
    assert type(arrived) is type(value)
    assert arrived == value


@pytest.mark.parametrize(
    "data", [{"os.system": ["true"]}, {"builtins.eval": ["1"]}, {"type": "eval"}, {"a": 1, "b": 2}]
)
def test_only_plain_types_are_built_from_a_message(data):
    with pytest.raises((ValueError, KeyError)):
        wire.decode(data, int)


# What tests may do with a program's values -> (program, tests that pass).
HOLDS = {
    "objects of a class": (
        """
class Pair:
    def __init__(self, a, b=0): self.a, self.b = a, b
def f(pairs): return sum(pair.a + pair.b for pair in pairs)""",
        "assert f([Pair(1, 2), Pair(3, b=4)]) == 10; assert Pair(5).a == 5; x = Pair(1); assert x == x != Pair(1)",
    ),
    "an object that is a container": (
        """
class Pair:
    def __len__(self): return 2
    def __getitem__(self, i): return "ab"[i]
    def __str__(self): return "pair"
    def __repr__(self): return "Pair()" """,
        "p = Pair(); assert p and len(p) == 2 and p[0] == 'a' and 'b' in p; assert str(p) + repr(p) == 'pairPair()'",
    ),
    "an iterator without end": (
        "def f():\n  while True: yield 1",
        "i = iter(f()); assert next(i) == 1 and [*zip(i, 'ab')] == [(1, 'a'), (1, 'b')]",
    ),
    "an iterator is no list": ("def f(x): return map(str, x)", "assert f([1]) != ['1'] and list(f([1])) == ['1']"),
    "views of a dictionary": ("def f(x): return x.keys(), x.items()", "assert f({1: 2}) == ({1}, {(1, 2)})"),
    "a function": ("def f(n): return lambda x: x + n", "assert f(1)(2) == 3 and callable(f(1))"),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2)",
    ),
    "a number of an enumeration": (
        "import enum\nclass E(enum.IntEnum): A = 3\ndef f(): return E.A",
        "assert f() == 3 and f() + 1 == 4",
    ),
    "a type as argument": (
        "def f(xs, kind): return [x for x in xs if type(x) is not kind]",
        "assert f([1, 'a'], int) == ['a']",
    ),
    "arguments changed in place": (
        "def f(xs, d, s): xs.sort(); d['n'] = len(xs); s.clear()",
        "xs, d, s = [3, 1], {}, {1}; assert f(xs, d, s) is None and (xs, d, s) == ([1, 3], {'n': 2}, set())",
    ),
    "an argument left alone": ("def f(xs): return sorted(xs)", "x = [3, 1]; assert f(x) == [1, 3] and x == [3, 1]"),
    "an exception": (
        "class Odd(ValueError): pass\ndef f(): raise Odd('odd')",
        "try: f()\nexcept ValueError as e: assert str(e) == 'odd'\nelse: assert False",
    ),
    "a module": ("import sys\ndef f(x): return sys.getsizeof(x)", "assert f(()) == sys.getsizeof(())"),
    "hundreds of calls": ("def f(x): return x + 1", "for i in range(500): assert f(i) == i + 1"),
    "a large answer": ("def f(n): return [*range(n)]", "assert f(10**5) == [*range(10**5)] and f(3) == [0, 1, 2]"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDS)
def test_tests_use_a_programs_values_as_in_one_process(name):
    program, tests = HOLDS[name]
    assert sandbox.run(program, tests, names=["f", "Pair"], modules=["sys"]).reason == "passed"


@pytest.mark.parametrize(
    "test, reason",
    [
        ("assert f(2) == 5", "AssertionError: in: assert f(2) == 5"),
        ("assert f(2) == 3\nassert f(3) == 5, 'small'", "AssertionError: small in: assert f(3) == 5, 'small'"),
        ("f('a')", "TypeError: can only concatenate str (not \"int\") to str in: f('a')"),
        ("f(len)", "TypeError: a builtin_function_or_method of the tests cannot be passed to the program in: f(len)"),
        ("assert g(1)", "NameError: name 'g' is not defined in: assert g(1)"),
        ("assert sys.version", "NameError: name 'sys' is not defined in: assert sys.version"),
    ],
)
def test_reason_of_a_failure_names_the_exception_and_the_test(test, reason):
    outcome = sandbox.run("def f(x): return x + 1", test, names=["f", "g"], modules=["sys"])
    assert (outcome.passed, outcome.reason) == (False, reason)


def test_helpers_run_with_the_tests_and_setup_runs_with_the_program():
    program = "def double(x): return 0\nclass Node: pass\ndef f(node): return node.value"
    tests = "assert double(f(root)) == 6"
    outcome = sandbox.run(
        program,
        tests,
        names=["f", "root"],
        helpers="def double(x): return 2 * x\ndef f(x): ...",
        setup="root = Node()\nroot.value = 3",
    )
    assert outcome.passed


def test_helper_does_not_replace_a_function_that_the_program_lacks():
    outcome = sandbox.run("def g(x): return 1", "assert f(0) == 1", names=["f"], helpers="def f(x): return 1")
    assert outcome.reason == "NameError: name 'f' is not defined in: assert f(0) == 1"
