"""Hostile templates neither run on, nor fill the memory, nor escape; ordinary templates give the same text as in
Jinja."""

import contextlib
import resource
import time

import pytest

from lean_ft.tokenizers import template_limits
from lean_ft.tokenizers.chat_template import ChatTemplate

CHAT = [{"role": "user", "content": "hello <b> & co"}, {"role": "assistant", "content": "fine"}]
GROW = "{% set ns = namespace(x='0123456789') %}{% for i in range(100) %}{% set ns.x = "
NEST = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = "
END = " %}{% endfor %}"

LONG_TEXTS = {
    "product": "{{ 'a' * 10**9 }}",
    "product from the right": "{{ 10**9 * 'a' }}",
    "product of lists": "{{ [0] * 10**10 }}",
    "concatenation": GROW + "ns.x ~ ns.x" + END,
    "sum of texts": GROW + "ns.x + ns.x" + END,
    "sum of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x" + END,
    "replace filter": GROW + "ns.x | replace('1', '11111111111111')" + END,
    "replace method": GROW + "ns.x.replace('', 'aaaaaaaaaaaaaa')" + END,
    "replace filter by name": GROW + "ns.x | replace(new='11111111111111', old='')" + END,
    "join filter": GROW + "[ns.x, ns.x] | join" + END,
    "join filter between": GROW + "ns.x | join(ns.x)" + END,
    "join filter of an attribute": GROW + "[{'a': ns.x}, {'a': ns.x}] | join('', attribute='a')" + END,
    "join method": GROW + "ns.x.join([ns.x, ns.x, ns.x])" + END,
    "center filter": "{{ 'a' | center(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "indent": "{{ ('\n' * 1000000) | indent(100000) }}",
    "indent by a text": "{{ ('\n' * 10000) | indent('a' * 100000) }}",
    "json indent": "{{ messages | tojson(indent=100000000) }}",
    "json separators": "{{ range(1000) | list | tojson(separators=('a' * 100000, 'b')) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format computed width": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "format again and again": GROW + "'{0}{0}{0}{0}'.format(ns.x)" + END,
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent computed": "{{ '%*d' % (1000000000, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1.0 }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "percent again and again": GROW + "'%s%s%s' % (ns.x, ns.x, ns.x)" + END,
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + GROW + "m(ns.x)" + END,
    "set block": "{% set ns = namespace(x='0123456789') %}{% for i in range(99) %}{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b" + END,  # noqa: E501
    "output": "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "nested lists": NEST + "[ns.x, ns.x]" + END + "{{ ns.x }}",
    "nested tuples": NEST + "(ns.x, ns.x)" + END + "{{ {ns.x: 1} }}",
    "nested dicts": NEST + "{'a': ns.x, 'b': ns.x}" + END + "{{ ns.x | tojson }}",
    "nested namespaces": NEST + "namespace(a=ns.x, b=ns.x)" + END + "{{ ns.x }}",
    "namespaces filled later": "{% set all = namespace() %}{% set ns = namespace(x=namespace(v=1)) %}{% for i in range(60) %}{% set n = namespace() %}{% set n.a = ns.x %}{% set n.b = ns.x %}{% set ns.x = n" + END + "{{ ns.x }}",  # noqa: E501
    "arguments of a macro": "{% set ns = namespace(x=(1, 2)) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ m(ns.x, ns.x) }}{% endfor %}{{ ns.x }}",
    "written lists that are kept": "{% set x = ['a'] * 20000 %}{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",  # noqa: E501
    "a dictionary's method of its type": "{% set d = {} %}{% for i in range(60) %}{{ dict.update(d, {i: d}) }}{% endfor %}{{ d }}",  # noqa: E501
    "join of a loop's turns": "{{ range(99999) | map('string') | join('a' * 30000) }}",
    "reversed": "{{ (range(9999) | map('string') | list | reverse) | join('a' * 300000) }}",
    "pieces that are kept": "{% set ns = namespace(x='a b' * 99999) %}{% set all = namespace(a=[]) %}{% for i in range(9999) %}{% set all.a = all.a + [ns.x.split('a')]" + END,  # noqa: E501
    "strings of a filter that are kept": "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 1000000}) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "date": "{{ strftime_now('%1000000000Y') }}",
}  # fmt: skip
LONG_TIMES = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a loop that passes over all": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",  # noqa: E501
    "a recursive loop": "{% for i in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a block without end": "{% block a %}{{ self.a() }}{% endblock %}",
    "a huge range": "{% for i in range(10**12) %}{% endfor %}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "products": "{% set ns = namespace(x=99) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x" + END,
    "a huge integer": "{{ ('f' * 3000000) | int(base=16) % 7 }}",
    "rounding": "{{ 1.5 | round(1000000, 'ceil') }}",
    "sums of lists": "{{ ([[1]] * 300000) | sum(start=[]) }}",
    "comparisons": "{% set x = 'a' * 3000000 %}{% set y = 'a' * 3000000 %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% if x == y and x in y %}{% endif %}{% endfor %}{% endfor %}",
    "tests": "{% for i in range(99999) %}{% for j in range(99999) %}{% if i is odd and j is in [1, 2] %}{% endif %}"
    "{% endfor %}{% endfor %}",
    "slices": "{% set x = 'a' * 3000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "a search from the right": "{% set x = 'a' * 3000000 %}{{ x.rfind('b' + 'a' * 1000000) }}",
    "a codec": "{{ ('\u00e9' * 3000000).encode('punycode') }}",
    "tags": "{{ (('<!--' * 300000) | safe).striptags() }}",
    "a power of a power": "{{ (2 ** 4000) ** 300000 }}",
    "divisions": "{% set x = 2 ** 4000 %}{% for i in range(99999) %}{% for j in range(99999) %}{% set y = x // 3 %}{% endfor %}{% "  # noqa: E501
    "endfor %}",
    "strips": "{% set x = 'a' * 3000000 %}{{ x.strip('b' * 1000000 + 'a') }}",
    "maps of maps": "{{ range(99999) | map('string') | map('center', 900) | map('upper') | list | length }}",
}
# These take long until they are stopped, for a reason that others share.
SLOW = {
    "a macro that calls itself twice",
    "join of a loop's turns",
    "divisions",
    "tests",
    "written lists that are kept",
}
SLOW |= {"a loop that passes over all", "nested loops", "nested dicts", "arguments of a macro", "maps of maps"}
SLOW |= {"sum of lists", "nested lists", "nested tuples", "reversed"}
ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "frames": "{{ messages.__init__.__globals__ }}",
    "attributes by filter": "{{ '' | attr('__class__') }}",
    "attributes by format": "{{ '{0.__class__}'.format(messages) }}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update(role='x') }}",
    "a file": "{% include '/etc/passwd' %}",
    "environment": "{{ self._TemplateReference__context.environment }}",
    "namespace": "{{ namespace.__init__.__globals__.os }}",
}


def render(source: str) -> str:
    return ChatTemplate(source).render(CHAT, None, False, {"bos_token": "<s>"})


@pytest.mark.parametrize(
    "attack", [pytest.param(one, marks=pytest.mark.long if one in SLOW else ()) for one in [*LONG_TEXTS, *LONG_TIMES]]
)
def test_hostile_templates_are_stopped(attack, monkeypatch):
    """With a tenth of the limits, so that the tests are fast."""
    for name in ("MAX_VALUE", "MAX_TOTAL"):
        monkeypatch.setattr(template_limits, name, getattr(template_limits, name) // 10)
    source = (LONG_TEXTS | LONG_TIMES)[attack].replace("3000000", "300000")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match="the chat template") as refusal:
        render(source)
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert len(str(refusal.value)) < 1200


@pytest.mark.parametrize("attack", ESCAPES)
def test_nothing_escapes_from_the_sandbox(attack):
    with contextlib.suppress(ValueError):
        assert render(ESCAPES[attack]) == ""  # forbidden values are undefined, which renders as nothing
    assert CHAT[0] == {"role": "user", "content": "hello <b> & co"}


def test_sources_that_are_nested_too_deeply_or_too_long_are_rejected():
    nested = ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "-" * 100_000 + "1 }}"]
    for source in [*nested, "{% for i in [1] %}" * 30 + "{% endfor %}" * 30]:
        with pytest.raises(ValueError, match="does not compile: it is nested too deeply"):
            ChatTemplate(source)
    with pytest.raises(ValueError, match="longer than 1,000,000 characters"):
        ChatTemplate("a" * 1_000_001)


def test_processor_time_is_limited(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match="more than 0.05 seconds of processor time"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")


def test_variables_of_a_loop_do_not_count_as_arguments():
    content = "x" * 3_000_000
    template = ChatTemplate("{% for m in messages %}{% set content = m.content %}{{ content.strip('\n') }}{% endfor %}")
    assert template.render([{"role": "user", "content": content}], None, False, {}) == content


def test_limits_grow_with_the_messages(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_VALUE", 10)
    monkeypatch.setattr(template_limits, "MAX_TOTAL", 10_000)
    chat = [{"role": "user", "content": "x" * 100_000}] * 20
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role ~ ': ' ~ (m.content.strip() | replace('"
        + "?" * 100
        + "', '')) ~ '\n' }}{% endfor %}"
    )
    assert len(template.render(chat, None, False, {})) == 20 * 100_007


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab' * 3 ~ 1 ~ none ~ [1, 'x'] }}", "ababab1None[1, 'x']"),
        ("{{ 2 ** 10 + 7 % 4 }}{{ 'n=%d %s' % (3, 'x') }}{{ '%05.1f' | format(2.25) }}", "1027n=3 x002.2"),
        ("{{ [1] + [2] }}{{ (1, 2)[::-1] }}{{ {'a': 1} | tojson }}", '[1, 2](2, 1){"a": 1}'),
        ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'a b' | replace(' ', '-') }}{{ 'aaa'.replace('a', 'b', 2) }}{{ 'aaa' | replace('a', 'b', 1) }}",
            "a-bbbabaa"),
        ("{{ messages | map(attribute='role') | join(', ') }}{{ messages | join('|', attribute='role') }}",
            "user, assistantuser|assistant"),
        ("{{ ', '.join(['a', 'b']) }}{{ '{}-{x:>3}'.format(1, x=2) }}{{ 'a' | center(3) }}{{ 'x'.ljust(3) }}!",
            "a, b1-  2 a x  !"),
        ("{{ 'a\nb' | indent(2, first=true) }}{{ undefined_name }}{{ [3, 1] | sum }}", "  a\n  b4"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a,b'.split(',')[1:] }}", "1['b']"),
        ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{{ loop.last }}{{ loop.length }}{% else %}none{% endfor %}", "x1True1"),  # noqa: E501
        ("{% for n in [1, [2]] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}", "12"),
        ("{% set a, b = 1, [2] %}{{ a in b or 2 in b }}{{ '<&>' }}{{ '<&>' | e }}{{ '<&>' | safe }}",
            "True<&>&lt;&amp;&gt;<&>"),
        ("{% macro m(x) %}[{{ x }}{{ caller() if caller }}]{% endmacro %}{% call m(1) %}in{% endcall %}{{ m('y') }}", "[1in][y]"),  # noqa: E501
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% filter upper %}b{% endfilter %}", "A1B"),
    ],
)  # fmt: skip
def test_ordinary_templates_give_the_text_of_jinja(source, text):
    assert render(source) == text
