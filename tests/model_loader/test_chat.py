import json
from datetime import datetime
from pathlib import Path

import pytest

from model_loader.chat import MAX_TEMPLATE_CHARS, ChatTemplate
from model_loader.errors import TemplateError
from model_loader.manifest import Manifest
from tests.support.checkpoints import CHAT_TEMPLATE

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Say “hi” <b> "}]


def render(template: str, messages: object = MESSAGES, **options: object) -> str:
    return ChatTemplate(template, "<s>", "</s>").render(messages, **options)  # type: ignore[arg-type]


def test_a_template_writes_messages_and_the_assistants_turn() -> None:
    text = render(CHAT_TEMPLATE)
    assert text == "<s><|system|>Be brief.</s><|user|>Say “hi” <b></s><|assistant|>"
    assert render(CHAT_TEMPLATE, add_generation_prompt=False) == text.removesuffix("<|assistant|>")


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {"a": "<é>"}}}]])
def test_rendering_equals_transformers(tmp_path: Path, tools: object) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- if tools %}{{ tools | tojson(indent=2) }}{{ '\\n' }}{% endif %}\n"
        "  {% for message in messages %}\n"
        "    {% if loop.first and message.role == 'system' %}"
        "[{{ message['content'] | trim }}]{% continue %}{% endif %}\n"
        "    {%- generation %}{{ message | tojson }}{% endgeneration %}\n"
        "  {% endfor %}\n"
        "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
    )
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=template, tools=tools, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(template, tools=tools) == theirs[0]
    assert transformers.__version__


def test_smollm2_renders_as_transformers_does(smollm2: Manifest) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    assert smollm2.chat_template is not None
    template = ChatTemplate(smollm2.chat_template, smollm2.bos_token, smollm2.eos_token)
    for messages in (MESSAGES, MESSAGES[1:], [*MESSAGES, {"role": "assistant", "content": "hi"}]):
        theirs, _ = render_jinja_template(
            conversations=[messages], chat_template=smollm2.chat_template, add_generation_prompt=True
        )
        assert template.render(messages) == theirs[0]


def test_the_date_is_the_callers() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26)) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "does not compile"),
        ("{{ messages[0].content.missing.deeper }}", "refused the messages"),
        ("{{ messages['x'] + 1 }}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "not allowed"),
        ("{{ messages.append(1) }}", "not allowed"),
        ("{{ 'a' * 100000000 }}", "not allowed"),
        ("{{ 9 ** 9 ** 9 }}", "not allowed"),
        ("{{ '%99999999d' % 999999999 }}", "not allowed"),
        ("{% for i in range(99999999) %}{% endfor %}", "chat template"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "wrote over"),
        ("{% include 'other' %}", "chat template"),
    ],
)
def test_what_a_template_must_not_do_is_an_error_that_says_so(template: str, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        render(template)


def test_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError):
        render("{{ messages[0].update({'content': 'x'}) }}", messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_an_oversized_template_is_refused() -> None:
    with pytest.raises(TemplateError, match="characters"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1), None, None)


def test_json_is_plain() -> None:
    assert json.loads(render("{{ messages | tojson }}")) == MESSAGES
    assert "<b>" in render("{{ messages | tojson }}")
