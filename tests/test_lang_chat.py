"""Roles: the model's own chat template around contents that are not known yet."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

import sglbatch as sgl
from sglbatch.lang.chat import ChatTemplate, turn_end
from sglbatch.lang.expressions import TemplateError
from sglbatch.tokenizer import Tokenizer
from tests.lang_backend import ScriptedBackend

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def backend(smollm2_tokenizer: Tokenizer) -> ScriptedBackend:
    return ScriptedBackend(smollm2_tokenizer, lambda *_: "Fine.")


def rendered(tokenizer: Tokenizer, messages: list[dict[str, str]], *, generate: bool) -> str:
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        tokenizer.chat_template or ""
    )
    return template.render(messages=messages, add_generation_prompt=generate)


def test_roles_equal_the_template(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, question: str) -> list[dict[str, str]]:
        s += sgl.user("\n  Hello, " + question)
        s += sgl.assistant(sgl.gen("a"))
        with s.user():
            s += "And"
            s += " you?"
        s.assistant(sgl.gen("b"))
        return s.messages()

    state = program.run("you", backend=backend)
    messages = [
        {"role": "user", "content": "Hello, you"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "And you?"},
        {"role": "assistant", "content": "Fine."},
    ]
    assert state.ret_value == state.messages() == messages
    tokenizer = backend.tokenizer
    assert backend.prompts[0] == rendered(tokenizer, messages[:1], generate=True)
    assert backend.prompts[1] == rendered(tokenizer, messages[:3], generate=True)
    assert state.text() == rendered(tokenizer, messages, generate=False)
    assert tokenizer.specials["<|im_start|>"] in backend.requests[0].prompt_ids.tolist()


def test_a_system_message_replaces_the_default(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.system("Be brief.") + sgl.user("Hi")
        s += sgl.assistant_begin() + sgl.gen("a") + sgl.assistant_end()

    program.run(backend=backend)
    assert backend.prompts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "SmolLM" not in backend.prompts[0]


def test_role_mistakes(backend: ScriptedBackend) -> None:
    def code_of(*expressions: Any) -> str:
        def program(s: Any) -> None:
            for expression in expressions:
                s += expression

        error = sgl.function(program).run(backend=backend).error()
        assert error is not None
        return error.code

    assert code_of(sgl.user_begin(), sgl.user("x")) == "open-role"
    assert code_of(sgl.user_end()) == "open-role"
    assert code_of(sgl.user_begin(), sgl.assistant_end()) == "open-role"


def test_the_end_of_turn_becomes_a_stop_where_the_model_does_not_end_there(smollm2_tokenizer: Tokenizer) -> None:
    class Other:
        """The real tokenizer of a model that does not end at its turns."""

        eos_token_ids = frozenset({0})

        def __getattr__(self, name: str) -> Any:
            return getattr(smollm2_tokenizer, name)

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("Hi" + sgl.gen("q")) + sgl.assistant(sgl.gen("a", stop="\n"))

    for tokenizer, stop in ((smollm2_tokenizer, ("\n",)), (Other(), ("\n", "<|im_end|>"))):
        backend = ScriptedBackend(tokenizer, lambda *_: "Fine.")
        program.run(backend=backend)
        assert [request.operation.stop for request in backend.requests] == [(), stop]
    assert turn_end("\n<|im_end|>", smollm2_tokenizer.specials) is None


def test_templates_that_cannot_be_used() -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(None).frame(("user",))
    assert caught.value.code == "no-chat-template"
    rewriting = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(TemplateError, match="changes earlier messages"):
        ChatTemplate(rewriting).frame(("user", "assistant"))
    with pytest.raises(TemplateError, match="exactly once"):
        ChatTemplate("{{ messages[0]['role'] }}").frame(("user",))
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(sgl.SglbatchError, match="no system"):
        ChatTemplate(refusing).frame(("system",))


def test_the_generation_prompt_is_the_assistants_prefix() -> None:
    thinking = CHATML.replace("'\\n' + m['content']", "'\\n' + ('<think></think>' if loop.last else '') + m['content']")
    frame = ChatTemplate(CHATML).frame(("user", "assistant"))
    assert (frame.prefix, frame.suffix) == ("<|im_start|>assistant\n", "<|im_end|>\n")
    assert "think" in ChatTemplate(thinking).frame(("user",)).prefix
