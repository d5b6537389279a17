// openai-node against a gateway. Prints what it saw as one JSON object.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const { BASE_URL, API_KEY, MODEL, TOOL_MODEL } = process.env;
const { question, tool, earlier } = JSON.parse(readFileSync(new URL("conversation.json", import.meta.url)));
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const seen = {};

const plain = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 8 });
seen.plain = { text: plain.choices[0].message.content, tokens: plain.usage.completion_tokens };

seen.stream = { text: "", usages: 0 };
const stream = await client.chat.completions.create({
  model: MODEL, messages, max_tokens: 8, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  seen.stream.text += chunk.choices[0]?.delta.content ?? "";
  seen.stream.usages += chunk.usage ? 1 : 0;
}

const called = client.chat.completions.stream({
  model: TOOL_MODEL,
  messages: [
    { role: "user", content: earlier.question },
    {
      role: "assistant",
      content: null,
      tool_calls: [
        { id: earlier.id, type: "function", function: { name: tool.name, arguments: JSON.stringify(earlier.arguments) } },
      ],
    },
    { role: "tool", tool_call_id: earlier.id, content: earlier.result },
    { role: "user", content: question },
  ],
  tools: [{ type: "function", function: tool }],
  max_tokens: 40,
  temperature: 0,
});
const { function: call } = (await called.finalChatCompletion()).choices[0].message.tool_calls[0];
seen.tool = { name: call.name, arguments: JSON.parse(call.arguments) };

const response = await client.responses.create({ model: MODEL, input: "Say hello.", max_output_tokens: 8 });
seen.response = response.output_text;
seen.events = [];
for await (const event of await client.responses.create({
  model: MODEL, input: "Say hello.", max_output_tokens: 8, stream: true,
})) {
  seen.events.push(event.type);
}

const floats = await client.embeddings.create({ model: MODEL, input: ["a", "b"], encoding_format: "float" });
const packed = await client.embeddings.create({ model: MODEL, input: ["a", "b"] });
seen.embeddings = floats.data.map((each) => each.embedding.length);
seen.apart = Math.max(...floats.data[1].embedding.map((value, at) => Math.abs(value - packed.data[1].embedding[at])));

seen.models = [];
for await (const model of client.models.list()) seen.models.push(model.id);

const mistake = await client.chat.completions.create({ model: "nothing", messages }).catch((error) => error);
seen.mistake = { kind: mistake.constructor.name, status: mistake.status, code: mistake.code };

console.log(JSON.stringify(seen));
