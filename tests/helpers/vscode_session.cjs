// node vscode_session.cjs EXTENSION FOLDER: starts the extension as VS Code does, and edits FOLDER/plan.scale by its client.
// `vscode` itself is there only inside the editor: a window with one folder takes its place.
const { spawn } = require("node:child_process");
const { readFileSync } = require("node:fs");
const Module = require("node:module");
const { join } = require("node:path");
const { pathToFileURL } = require("node:url");
const protocol = require("vscode-languageserver-protocol/node");

const [extension, folder] = process.argv.slice(2);
const url = (name) => pathToFileURL(join(folder, name)).href;
const tell = (what, value) => console.log(JSON.stringify([what, value]));

class LanguageClient {
  constructor(id, name, server, options) {
    tell("started", [id, server.command.replace(folder, ""), server.args, options.documentSelector]);
    this.process = spawn(server.command, server.args, { stdio: ["pipe", "pipe", "inherit"] });
  }
  start() {
    const { stdout, stdin } = this.process;
    const [reader, writer] = [new protocol.StreamMessageReader(stdout), new protocol.StreamMessageWriter(stdin)];
    this.connection = protocol.createProtocolConnection(reader, writer);
    this.connection.listen();
    started = this;
  }
  async stop() {
    await this.connection.sendRequest(protocol.ShutdownRequest.type);
    await this.connection.sendNotification(protocol.ExitNotification.type);
  }
}

let started;
const settings = { get: () => "" };
const stands = {
  vscode: { workspace: { workspaceFolders: [{ uri: { fsPath: folder } }], getConfiguration: () => settings } },
  "vscode-languageclient/node": { LanguageClient },
};
const load = Module._load;
Module._load = (name, ...more) => stands[name] ?? load(name, ...more);

async function main() {
  const own = require(extension);
  await own.activate();
  const { connection, process: server } = started;
  const heard = [];
  let wake = () => {};
  connection.onNotification(protocol.PublishDiagnosticsNotification.type, (it) => {
    heard.push(it.diagnostics);
    wake();
  });
  const diagnostics = async () => {
    while (!heard.length) await new Promise((done) => (wake = done));
    return heard.shift();
  };
  const ask = (type, more = {}) => connection.sendRequest(type, { textDocument: { uri: url("plan.scale") }, ...more });

  const rename = { prepareSupport: true };
  const symbols = { hierarchicalDocumentSymbolSupport: true };
  const capabilities = { textDocument: { rename, documentSymbol: symbols }, general: { positionEncodings: ["utf-16"] } };
  const workspaceFolders = [{ uri: pathToFileURL(folder).href, name: "plans" }];
  const able = await connection.sendRequest(protocol.InitializeRequest.type, {
    processId: process.pid, rootUri: workspaceFolders[0].uri, capabilities, workspaceFolders,
  });
  tell("able", Object.keys(able.capabilities).filter((key) => able.capabilities[key]).sort());
  await connection.sendNotification(protocol.InitializedNotification.type, {});
  const text = readFileSync(join(folder, "plan.scale"), "utf8");
  const opened = { uri: url("plan.scale"), languageId: "scale", version: 1, text };
  await connection.sendNotification(protocol.DidOpenTextDocumentNotification.type, { textDocument: opened });
  const [mistake] = await diagnostics();
  tell("diagnostics", [mistake.code, mistake.message, mistake.range]);

  const context = { diagnostics: [mistake] };
  const [action] = await ask(protocol.CodeActionRequest.type, { range: mistake.range, context });
  const [edit] = action.edit.changes[url("plan.scale")];
  tell("action", [action.title, edit.newText, edit.range]);
  const change = { textDocument: { uri: url("plan.scale"), version: 2 }, contentChanges: [{ range: edit.range, text: edit.newText }] };
  await connection.sendNotification(protocol.DidChangeTextDocumentNotification.type, change);
  while ((await diagnostics()).length);

  const first = text.split("\n")[0];
  const position = { line: 0, character: first.indexOf("hidden") };
  const hover = await ask(protocol.HoverRequest.type, { position });
  tell("hover", [hover.contents.value, first.slice(hover.range.start.character, hover.range.end.character)]);
  const edits = await ask(protocol.RenameRequest.type, { position, newName: "wide" });
  tell("renamed", Object.values(edits.changes).map((each) => each.length));
  const { data } = await ask(protocol.SemanticTokensRequest.type);
  tell("colours", data.length / 5);
  tell("outline", (await ask(protocol.DocumentSymbolRequest.type)).map((it) => it.name));
  const ended = new Promise((done) => server.on("exit", done));
  await own.deactivate();
  tell("ended", await ended);
  connection.dispose();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
