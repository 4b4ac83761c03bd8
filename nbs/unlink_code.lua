-- nbdev links names in backticks, also in the comments of a signature, where a link cannot be shown:
-- [`scale`](https://…) in a block of code becomes `scale` again
function CodeBlock(block)
  block.text = block.text:gsub('%[(`[^`\n]+`)%]%([^)%s]+%)', '%1')
  return block
end
