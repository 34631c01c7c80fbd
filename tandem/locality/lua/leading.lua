-- How many leading blocks of a chain each worker holds. Reads ever larger parts of its start, and then leaps: a
-- holder of a block has those before it. While some blocks are old, more is read before it leaps, and counted blocks
-- become recent. ARGV: packed hashes, half of the bound, which counts for reports too from now on. Returns the counts
-- as JSON and the blocks that are left for `age`: after how many, and up to which (the same = none).
local HASH_BYTES, FIRST_PART, MOST_READ = 32, 16, 512
local packed, half = ARGV[1], tonumber(ARGV[2])
local state = open()
local total = #packed / HASH_BYTES
if not state or total == 0 then return { '{}', 0, 0 } end
if state.half ~= half then
  redis.pcall('HSET', META, 'half', half)
  state.half = half
end

local racing, num_racing, leading = {}, 0, {}

-- Adds all workers whose current slot holds the first block.
local function start(holders)
  local slots, fields, ids = slots_of(holders), {}, {}
  if #slots == 0 then return end
  for i, slot in ipairs(slots) do fields[i] = 's:' .. slot end
  local owners, asked = redis.call('HMGET', META, unpack(fields)), {}
  fields = {}
  for i, id in ipairs(owners) do
    if id then fields[#fields + 1], ids[#ids + 1], asked[#asked + 1] = 'w:' .. id, id, slots[i] end
  end
  if #ids == 0 then return end
  for i, record in ipairs(redis.call('HMGET', META, unpack(fields))) do
    local slot = asked[i]
    if record and string.sub(record, 1, SLOT_BYTES + 1) == slot .. '1' and not racing[slot] then
      racing[slot] = ids[i]
      num_racing = num_racing + 1
    end
  end
end

local decoded = {}
local function holder_set(holders)
  local set = decoded[holders]
  if not set then
    set = {}
    for _, slot in ipairs(slots_of(holders)) do set[slot] = true end
    decoded[holders] = set
  end
  return set
end

local function narrow(holders, position)
  local set = holder_set(holders)
  for slot, id in pairs(racing) do
    if not set[slot] then
      leading[id], racing[slot] = position, nil
      num_racing = num_racing - 1
    end
  end
end

local collect, old_fields, old_holders = new_collector()

-- Look at every block from `position` on, `count` of them at most.
local previous
local function step(position, count)
  local fields = unpack_fields(packed, HASH_BYTES, position, math.min(count, total - position))
  local values, is_old = read(state, fields)
  local matched = #fields
  for i = 1, #fields do
    local holders = values[i]
    if holders ~= previous then
      if previous == nil then start(holders or '') else narrow(holders or '', position + i - 1) end
      previous = holders
      if num_racing == 0 then
        matched = i - 1
        break
      end
    end
  end
  if state.old > 0 then collect(fields, values, is_old, matched) end
  return position + #fields
end

local function holders_of(position)
  local first = position * HASH_BYTES + 1
  local field = string.sub(packed, first, first + KEY_BYTES - 1)
  return redis.call('HGET', YOUNG, field) or state.old > 0 and redis.call('HGET', OLD, field) or ''
end

local function all_hold(position)
  local holders = holders_of(position)
  if holders == previous then return true end
  local set = holder_set(holders)
  for slot in pairs(racing) do
    if not set[slot] then return false end
  end
  previous = holders
  return true
end

-- The first block from `position` on that a racing worker lacks, found by doubling steps and then by halves.
local function leap(position)
  local first, beyond, size = position, total, FIRST_PART
  while first < beyond do
    local probe = math.min(first + size, beyond) - 1
    if all_hold(probe) then
      first, size = probe + 1, size * 2
    else
      beyond, size = probe, math.max(1, math.floor((probe - first) / 2))
    end
  end
  return first
end

local position, part = step(0, FIRST_PART), FIRST_PART * 2
local num_read = position
while num_racing > 0 and position < total do
  if state.old > 0 and position < MOST_READ then
    position, part = step(position, math.min(part, MOST_READ - position)), part * 2
    num_read = position
  else
    position = leap(position)
    if position < total then narrow(holders_of(position), position) end
  end
end
for _, id in pairs(racing) do leading[id] = total end

-- NOTE: without room in the recent generation, moving the first blocks would drop the old one with the others in it.
-- So then all of them are left to `age`.
local is_all = state.old <= 0 or position <= num_read
if is_all or has_room(state, half, old_holders) then
  make_young(state, half, old_fields, old_holders)
else
  num_read = 0
end
return { cjson.encode(leading), is_all and position or num_read, position }
