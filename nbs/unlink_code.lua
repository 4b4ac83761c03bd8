-- nbdev links names in backticks, also in the comments of a signature, where a link cannot be shown:
-- [`scale`](https://…) in a block of code becomes `scale` again. So does __main__.scale, as classes of a page are called
-- while nbdev runs it.
-- What a plotting call returns, and a progress bar that has reached its end, are not shown next to the result.
-- Printed tables get a class, so that they scroll on a narrow screen. build.py does the same for Sphinx.
local noise = {'^%s*<Axes', '^%s*array%(%[+<Axes', '^%s*<matplotlib%.', '^%s*%[[^\n]*Text%(', '<progress'}

local function is_noise(text)
  for _, pattern in ipairs(noise) do
    if text:find(pattern) then return true end
  end
  return false
end

-- Text that was printed as a table: most of its lines have columns, or four lines in a row
local function is_table(text)
  local lines, columns, row, in_a_row = 0, 0, 0, 0
  for line in text:gmatch('[^\n]+') do
    lines = lines + 1
    if line:find('%S   *%S') then
      columns = columns + 1
      row = row + 1
      in_a_row = math.max(in_a_row, row)
    else
      row = 0
    end
  end
  return columns >= 3 and (columns >= lines / 2 or in_a_row >= 4)
end

function CodeBlock(block)
  if (#block.classes == 0 or block.classes[1] == 'html') and is_noise(block.text) then
    return {}
  end
  if #block.classes == 0 and is_table(block.text) then
    block.classes:insert('printed-table')
  end
  block.text = block.text:gsub('%[(`[^`\n]+`)%]%([^)%s]+%)', '%1')
  block.text = block.text:gsub('__main__%.', '')
  return block
end

function RawBlock(block)
  if block.text:find('<progress max') or block.text:find('progress::-webkit-progress-bar', 1, true) then
    return {}
  end
end
