// Starts `scalec lsp` for the plans of a window; the server does all else.

const { existsSync } = require("node:fs");
const { join } = require("node:path");
const { workspace } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

function program() {
  const found = (workspace.workspaceFolders ?? []).map((it) => join(it.uri.fsPath, ".venv", "bin", "scalec"));
  return workspace.getConfiguration("scalec").get("path") || found.find((path) => existsSync(path)) || "scalec";
}

exports.activate = () => {
  const documentSelector = [{ language: "scale" }];
  client = new LanguageClient("scalec", "scalec", { command: program(), args: ["lsp"] }, { documentSelector });
  return client.start();
};

exports.deactivate = () => client?.stop();
