"""The chat format: renders a conversation as weighted segments, in the words of ``chat_template.jinja``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ANSWER_WEIGHT, USER_WEIGHT, SYSTEM_WEIGHT = 1.0, 0.1, 0.03
TOOLS_HEAD = "# Tools\n\nYou may call one or more functions to help the user.\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, reply with\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
)
Message = dict[str, str]
Tool = dict[str, Any]
Call = tuple[str, dict[str, Any]]
Segment = tuple[str, float]


@dataclass(frozen=True)
class Turn:
    """One exchange: what the user says, the reasoning before the answer, the answer."""

    user: str
    think: str
    answer: str


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_text(calls: Sequence[Call]) -> str:
    """The assistant's text of one or several tool calls."""
    bodies = (dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def chat(turns: Sequence[tuple[str, str]], system: str | None = None) -> list[Message]:
    """Messages of a system prompt and (user, answer) pairs."""
    out = [{"role": "system", "content": system}] if system else []
    for user, answer in turns:
        out += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return out


def render(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    think: str | None = None,
    empty_think: bool = False,
) -> list[Segment]:
    """Segments (text, weight as a training target) of one conversation.

    `think` is the reasoning of the last answer, None for an answer without any; `empty_think` renders the last answer
    as ``enable_thinking=False`` does.
    """
    out: list[Segment] = []
    first_system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        head = first_system + "\n\n" if first_system else ""
        listed = "".join("\n" + dumps(tool) for tool in tools)
        out.append((f"{START}system\n{head}{TOOLS_HEAD}{listed}{TOOLS_TAIL}{END}\n", SYSTEM_WEIGHT))
    elif first_system is not None:
        out.append((f"{START}system\n{first_system}{END}\n", SYSTEM_WEIGHT))
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "system" and i > 0:
            out.append((f"{START}system\n{content}{END}\n", SYSTEM_WEIGHT))
        elif role == "user":
            out.append((f"{START}user\n{content}{END}\n", USER_WEIGHT))
        elif role == "tool":
            out.append((_tool_results(messages, i), USER_WEIGHT))
        elif role == "assistant":
            head, body = f"{START}assistant\n", content
            if i == last and think is not None:
                head, body = head + "<think>\n", f"{think}\n</think>\n\n{body}"
            elif i == last and empty_think:
                head += "<think>\n\n</think>\n\n"
            out += [(head, 0.0), (body + END, ANSWER_WEIGHT), ("\n", 0.0)]
    return out


def _tool_results(messages: Sequence[Message], i: int) -> str:
    """Results of one round of calls share one user turn."""
    opens = i == 0 or messages[i - 1]["role"] != "tool"
    closes = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
    body = f"\n<tool_response>\n{messages[i]['content']}\n</tool_response>"
    return (f"{START}user" if opens else "") + body + (f"{END}\n" if closes else "")


def prompt_of(segments: Sequence[Segment]) -> tuple[str, str]:
    """Splits rendered segments into the prompt of the last answer and that answer."""
    last = max(i for i, s in enumerate(segments) if s[1] == ANSWER_WEIGHT)
    return "".join(text for text, _ in segments[:last]), segments[last][0].removesuffix(END)
