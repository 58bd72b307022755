"""The job of templates/judge.py on the plain openai client, as one would write it by hand.

    python benchmarks/judge_openai.py samples/essays.jsonl out.jsonl --model gpt-5-mini
    python benchmarks/lines_of_code.py         # its lines beside the template's

It does for the rows what `sglbatch run templates/judge.py samples/essays.jsonl` does: three questions about each essay
side by side, answers that are one of the choices, a verdict that sees the scores, rows in input order, an error that
stays its row's, several rows at a time. It has no journal, so a stopped run starts over, no plan, no shared prefixes.
"""

import argparse
import asyncio
import json
from pathlib import Path

import openai

SCORES = ["1", "2", "3", "4", "5"]

DIMENSIONS = {
    "clarity": "Is it easy to understand what each sentence means?",
    "evidence": "Are claims backed by facts or examples?",
    "structure": "Does each part lead to the next and to a conclusion?",
}


async def choose(client, model, messages, choices):
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "enum": choices}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    response = await client.chat.completions.create(
        model=model,
        messages=messages,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "choice", "schema": schema, "strict": True},
        },
    )
    choice = response.choices[0]
    if choice.message.refusal or choice.finish_reason != "stop":
        raise ValueError(f"no answer: {choice.message.refusal or choice.finish_reason}")
    answer = json.loads(choice.message.content)["answer"]
    if answer not in choices:
        raise ValueError(f"unexpected answer {answer!r}")
    return answer


async def judge(client, model, topic, essay):
    system = "You grade short essays by students. Scores go from 1 (poor) to 5 (excellent)."
    start = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Topic: {topic}\nEssay: {essay}"},
    ]
    questions = [
        [*start, {"role": "user", "content": f"{name.capitalize()}: {meaning}\nScore:"}]
        for name, meaning in DIMENSIONS.items()
    ]
    scores = await asyncio.gather(*(choose(client, model, question, SCORES) for question in questions))
    summary = "".join(f"{name.capitalize()}: {score} of 5\n" for name, score in zip(DIMENSIONS, scores, strict=True))
    verdict_messages = [*start, {"role": "user", "content": f"{summary}Verdict (accept or revise):"}]
    verdict = await choose(client, model, verdict_messages, ["accept", "revise"])
    numbers = [int(score) for score in scores]
    return {
        **dict(zip(DIMENSIONS, numbers, strict=True)),
        "verdict": verdict,
        "_return": sum(numbers) / len(numbers),
    }


async def judge_row(client, model, row, limit):
    async with limit:
        try:
            return await judge(client, model, row["topic"], row["essay"])
        except (openai.OpenAIError, ValueError, KeyError) as error:
            return {"_error": f"{type(error).__name__}: {error}"}


async def run(source, target, model, base_url, concurrency):
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    limit = asyncio.Semaphore(concurrency)
    async with openai.AsyncOpenAI(base_url=base_url, max_retries=5) as client:
        results = await asyncio.gather(*(judge_row(client, model, row, limit) for row in rows))
    target.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    failed = sum("_error" in result for result in results)
    print(f"{len(results)} rows, {failed} failed")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--base-url")
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    asyncio.run(run(options.source, options.target, options.model, options.base_url, options.concurrency))


if __name__ == "__main__":
    main()
