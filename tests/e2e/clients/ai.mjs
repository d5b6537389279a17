// The Vercel AI SDK against a gateway. Prints what it saw as one JSON object.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, jsonSchema, streamText, tool as describe } from "ai";

const { BASE_URL, API_KEY, MODEL, TOOL_MODEL } = process.env;
const { question, tool, earlier } = JSON.parse(readFileSync(new URL("conversation.json", import.meta.url)));
const gateway = createOpenAICompatible({ name: "llmgw", baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, includeUsage: true });
const seen = {};

const plain = await generateText({ model: gateway(MODEL), prompt: "Say hello.", maxOutputTokens: 8 });
seen.plain = { text: plain.text, tokens: plain.usage.outputTokens, reason: plain.finishReason };

const stream = streamText({ model: gateway(MODEL), prompt: "Say hello.", maxOutputTokens: 8 });
seen.stream = { text: "", pieces: 0 };
for await (const piece of stream.textStream) {
  seen.stream.text += piece;
  seen.stream.pieces += 1;
}
seen.stream.tokens = (await stream.usage).outputTokens;

const known = { toolCallId: earlier.id, toolName: tool.name };
const { toolCalls } = await generateText({
  model: gateway(TOOL_MODEL),
  messages: [
    { role: "user", content: earlier.question },
    { role: "assistant", content: [{ type: "tool-call", ...known, input: earlier.arguments }] },
    { role: "tool", content: [{ type: "tool-result", ...known, output: { type: "text", value: earlier.result } }] },
    { role: "user", content: question },
  ],
  tools: { [tool.name]: describe({ description: tool.description, inputSchema: jsonSchema(tool.parameters) }) },
  maxOutputTokens: 40,
  temperature: 0,
});
seen.tool = { name: toolCalls[0].toolName, arguments: toolCalls[0].input };

const { embeddings } = await embedMany({ model: gateway.embeddingModel(MODEL), values: ["a", "b"] });
seen.embeddings = embeddings.map((each) => each.length);

const mistake = await generateText({ model: gateway("nothing"), prompt: "x", maxRetries: 0 }).catch((error) => error);
seen.mistake = { kind: mistake.name, status: mistake.statusCode, retryable: mistake.isRetryable, text: mistake.message };

console.log(JSON.stringify(seen));
