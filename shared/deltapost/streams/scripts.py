"""The two things that Redis must do in one step, as Lua. Both touch only the one key they are given."""

from __future__ import annotations

from typing import Final

#: KEYS[1] the epoch key; ARGV[1] the old name, ARGV[2] the new one. Returns the name in force.
REPLACE_EPOCH: Final = """
local name = redis.call('GET', KEYS[1])
if name and name ~= ARGV[1] then
  return name
end
redis.call('SET', KEYS[1], ARGV[2])
return ARGV[2]
"""

#: KEYS[1] the stream; ARGV[1] the last id that goes, ARGV[2] the lowest that may stay. Returns how many went.
#:
#: XTRIM leaves no trace of what it removed: max-deleted-entry-id moves only with XDEL. So XSETID notes the
#: highest id removed here and sets entries-added to what is left. From then on entries-added above length
#: means that somebody else removed entries. That XTRIM removed all it should is looked up, not assumed.
TRIM: Final = """
local function above(a, b)
  local am, as = string.match(a, '(%d+)-(%d+)')
  local bm, bs = string.match(b, '(%d+)-(%d+)')
  if am == bm then
    am, bm = as, bs
  end
  return #am > #bm or (#am == #bm and am > bm)
end

local highest = redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', 1)
if #highest == 0 then
  return 0
end
local removed = redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[2])
if #redis.call('XRANGE', KEYS[1], '-', ARGV[1], 'COUNT', 1) > 0 then
  return redis.error_reply('ERR XTRIM left entries that it was told to remove')
end
local info = redis.call('XINFO', 'STREAM', KEYS[1])
local facts = {}
for i = 1, #info, 2 do
  facts[info[i]] = info[i + 1]
end
local through = highest[1][1]
if above(facts['max-deleted-entry-id'], through) then
  through = facts['max-deleted-entry-id']
end
redis.call('XSETID', KEYS[1], facts['last-generated-id'],
  'ENTRIESADDED', facts['length'], 'MAXDELETEDID', through)
return removed
"""
