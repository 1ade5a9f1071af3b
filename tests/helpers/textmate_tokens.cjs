// node textmate_tokens.cjs GRAMMAR PLAN…: for each plan a line of JSON, its words with their scopes as VS Code has them.
const { readFileSync } = require("node:fs");
const oniguruma = require("vscode-oniguruma");
const { INITIAL, Registry, parseRawGrammar } = require("vscode-textmate");

const [grammar, ...plans] = process.argv.slice(2);
const wasm = readFileSync(require.resolve("vscode-oniguruma/release/onig.wasm"));

async function main() {
  await oniguruma.loadWASM(wasm);
  const onigLib = Promise.resolve({
    createOnigScanner: (patterns) => new oniguruma.OnigScanner(patterns),
    createOnigString: (text) => new oniguruma.OnigString(text),
  });
  const loadGrammar = async () => parseRawGrammar(readFileSync(grammar, "utf8"), grammar);
  const loaded = await new Registry({ onigLib, loadGrammar }).loadGrammar("source.scale");
  for (const plan of plans) {
    const words = [];
    let state = INITIAL;
    for (const line of readFileSync(plan, "utf8").split("\n")) {
      const found = loaded.tokenizeLine(line, state);
      state = found.ruleStack;
      for (const { startIndex, endIndex, scopes } of found.tokens) {
        const text = line.slice(startIndex, endIndex);
        if (text.trim()) words.push([text, scopes.slice(1).join(" ")]);
      }
    }
    console.log(JSON.stringify(words));
  }
}

main();
