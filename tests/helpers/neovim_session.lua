-- What someone does in Neovim with a plan: each step's result as a line of JSON in the file that SCALEC_SEEN names.
local seen = assert(io.open(vim.env.SCALEC_SEEN, "w"))
local HANGS = tonumber(vim.env.SCALEC_HANGS) * 1000

local function tell(what, value)
  seen:write(vim.json.encode({ what, value }), "\n")
  seen:flush()
end

local function until_true(what, condition)
  assert(vim.wait(HANGS, condition, 20), "nothing came of: " .. what)
end

local function move_to(words, within)
  for row, text in ipairs(vim.api.nvim_buf_get_lines(0, 0, -1, false)) do
    local column = text:find(words, 1, true)
    if column then
      vim.api.nvim_win_set_cursor(0, { row, column - 1 + (within or 0) })
      return
    end
  end
  error("no words " .. words)
end

local function ask(method, more)
  local client = vim.lsp.get_clients({ bufnr = 0 })[1]
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  local answer = client:request_sync(method, vim.tbl_extend("force", params, more or {}), HANGS, 0)
  assert(answer and not answer.err, method .. vim.inspect(answer))
  return answer.result
end

local function name()
  return vim.fs.basename(vim.api.nvim_buf_get_name(0))
end

local function session()
  until_true("attaching", function() return #vim.lsp.get_clients({ bufnr = 0, name = "scalec" }) == 1 end)
  tell("encoding", vim.lsp.get_clients({ bufnr = 0 })[1].offset_encoding)
  until_true("diagnostics", function() return #vim.diagnostic.get(0) > 0 end)
  local mistake = vim.diagnostic.get(0)[1]
  tell("diagnostics", { mistake.code, mistake.message, mistake.lnum, mistake.col, mistake.end_col })

  move_to("max_steps")
  vim.lsp.buf.code_action({ apply = true, filter = function(it) return it.title == "write `steps`" end })
  until_true("the code action", function() return #vim.diagnostic.get(0) == 0 end)
  tell("mended", vim.api.nvim_get_current_line())

  move_to("hidden = 64")
  local found = ask("textDocument/hover")
  tell("hover", { found.contents.value, found.range.start.character, found.range["end"].character })
  tell("prepared", ask("textDocument/prepareRename"))

  move_to("ffn over")
  until_true("colours", function() return #(vim.lsp.semantic_tokens.get_at_pos() or {}) > 0 end)
  tell("colour", vim.lsp.semantic_tokens.get_at_pos()[1].type)
  move_to("over tp", 5)
  tell("completion", vim.tbl_map(function(it) return it.label end, ask("textDocument/completion")))

  vim.opt_local.foldmethod = "expr"
  vim.opt_local.foldexpr = "v:lua.vim.lsp.foldexpr()"
  move_to("seq = 128")
  until_true("folds", function() return vim.fn.foldlevel(".") > 0 end)
  tell("folds", vim.tbl_map(vim.fn.foldlevel, vim.fn.range(1, vim.fn.line("$"))))
  tell("outline", vim.tbl_map(function(it) return it.text end, vim.lsp.util.symbols_to_items(ask("textDocument/documentSymbol"), 0, "utf-8")))
  move_to("shard ")
  vim.lsp.buf.format({ timeout_ms = HANGS })
  tell("formatted", vim.api.nvim_get_current_line())

  move_to("ffn over")
  vim.lsp.buf.rename("inner")
  until_true("renaming", function() return vim.api.nvim_get_current_line():find("inner over", 1, true) end)
  tell("renamed", vim.api.nvim_get_current_line())
  move_to("hidden = 64")
  vim.lsp.buf.rename("wide")
  until_true("renaming", function() return vim.api.nvim_get_current_line():find("wide = 64", 1, true) end)
  tell("renamed", vim.api.nvim_get_current_line())

  move_to("inner over")
  vim.lsp.buf.definition()
  until_true("the definition", function() return name() == "tiny.scale" end)
  tell("definition", { name(), vim.api.nvim_get_current_line(), vim.fn.expand("<cword>") })
  until_true("attaching to the model", function() return #vim.lsp.get_clients({ bufnr = 0 }) == 1 end)
  local function hinted() return vim.lsp.inlay_hint.is_enabled({ bufnr = 0 }) and #vim.lsp.inlay_hint.get({ bufnr = 0 }) > 0 end
  until_true("inlay hints", hinted)
  tell("hints", vim.tbl_map(function(it) return { it.inlay_hint.position.line, it.inlay_hint.label } end, vim.lsp.inlay_hint.get({ bufnr = 0 })))
  move_to("rmsnorm(", 8)
  local help = ask("textDocument/signatureHelp")
  tell("signature", { help.signatures[1].label, help.activeParameter })
end

vim.schedule(function()
  local done, why = xpcall(session, debug.traceback)
  tell("done", done or why)
  seen:close()
  vim.cmd("qall!")
end)
