-- nbdev links names in backticks, also in the comments of a signature, where a link cannot be shown:
-- [`scale`](https://…) in a block of code becomes `scale` again.
-- What a plotting call returns, and a progress bar that has reached its end, are not shown next to the result.
local noise = {'^%s*<Axes', '^%s*array%(%[+<Axes', '^%s*<matplotlib%.', '^%s*%[Text%(', '<progress'}

local function is_noise(text)
  for _, pattern in ipairs(noise) do
    if text:find(pattern) then return true end
  end
  return false
end

function CodeBlock(block)
  if (#block.classes == 0 or block.classes[1] == 'html') and is_noise(block.text) then
    return {}
  end
  block.text = block.text:gsub('%[(`[^`\n]+`)%]%([^)%s]+%)', '%1')
  return block
end

function RawBlock(block)
  if block.text:find('<progress max') or block.text:find('progress::-webkit-progress-bar', 1, true) then
    return {}
  end
end
