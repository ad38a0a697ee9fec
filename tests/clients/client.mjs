// The openai package for Node against the server at argv[2]: prints one JSON line a check, exits 1 if one fails.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , baseURL, apiKey, packages] = process.argv;
const entry = createRequire(`${packages}/`).resolve("openai");
const { default: OpenAI } = await import(pathToFileURL(entry));
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });

const prompt = "Question: Tom has 17 apples. He buys 25 more. How many apples does Tom have?\nAnswer:";
const messages = [
  { role: "user", content: "Ada has 12 pens and gives away 5 of them. How many pens does Ada have left?" },
];
const model = (await client.models.list()).data[0].id;

async function collect(stream, text) {
  let all = "";
  for await (const piece of stream) if (piece.choices.length) all += text(piece.choices[0]) ?? "";
  return all;
}

const checks = {
  async completion() {
    const ask = { model, prompt, max_tokens: 48, temperature: 0 };
    const whole = await client.completions.create(ask);
    assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
    const streamed = await collect(await client.completions.create({ ...ask, stream: true }), (c) => c.text);
    assert.equal(streamed, whole.choices[0].text);
    return streamed;
  },
  async chat() {
    const ask = { model, messages, max_completion_tokens: 64, temperature: 0 };
    const whole = await client.chat.completions.create(ask);
    assert.equal(whole.choices[0].finish_reason, "stop");
    const stream = await client.chat.completions.create({
      ...ask,
      stream: true,
      stream_options: { include_usage: true },
    });
    let usage = null;
    let streamed = "";
    for await (const piece of stream) {
      if (piece.choices.length) streamed += piece.choices[0].delta.content ?? "";
      usage = piece.usage ?? usage;
    }
    assert.equal(streamed, whole.choices[0].message.content);
    assert.deepEqual(usage, whole.usage);
    return streamed;
  },
  async errors() {
    await assert.rejects(client.completions.create({ model, prompt, temperature: -1 }), OpenAI.BadRequestError);
    await assert.rejects(client.completions.create({ model: "nobody", prompt }), OpenAI.NotFoundError);
    const stranger = new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 });
    await assert.rejects(stranger.completions.create({ model, prompt }), OpenAI.AuthenticationError);
    return "typed";
  },
  async abort() {
    for (const api of ["chat", "completions"]) {
      const ask = { model, max_tokens: 3000, ignore_eos: true, stream: true };
      const stream =
        api === "chat"
          ? await client.chat.completions.create({ ...ask, messages })
          : await client.completions.create({ ...ask, prompt });
      let seen = 0;
      for await (const piece of stream) {
        assert.ok(piece.choices.length);
        if (++seen === 3) stream.controller.abort();
      }
      assert.ok(seen >= 3);
    }
    const after = await client.completions.create({ model, prompt, max_tokens: 4, temperature: 0 });
    return after.choices[0].text;
  },
};

for (const [name, check] of Object.entries(checks)) console.log(JSON.stringify({ name, answer: await check() }));
