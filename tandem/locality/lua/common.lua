-- Functions that every script shares. The index is three hashes, all lost or kept together:
--   META   generation · young · old (replicas in the recent and the old generation) · slots (the last one given out)
--          rotations
--          half = half of the bound, as the latest query sent it; absent until the first query
--          w:<worker id> = slot, then "<1 when its snapshot is complete> <epoch> <sequence> <time of last report, s>"
--          s:<slot>      = worker id; absent when the slot is over. Slot 0 stands for none.
--   YOUNG  the recent generation: <15 bytes of a block hash> = its holders: slots of 4 bytes each; '' = generation
--   OLD    the same, for blocks that were not used recently; a block is in one of the two
-- Slots are 4 bytes wherever they are written, epochs 20 digits.
-- A script that finds them incomplete or damaged starts a new generation (when it may write) or finds nothing.
local META, YOUNG, OLD = KEYS[1], KEYS[2], KEYS[3]
local KEY_BYTES, SLOT_BYTES = 15, 4
local MAX_HOLDERS = 7000  -- Lua hands a command no more than 8000 arguments
local SILENT_S = 30

local function pack_slot(number)
  return struct.pack('>I4', number)
end

local function is_count(text)
  return type(text) == 'string' and string.match(text, '^%d+$') and #text < 16
end

-- The state of the index, or nil when it is missing or damaged.
local function open()
  local found = redis.pcall('HMGET', META, 'generation', 'young', 'old', 'slots', 'rotations', 'half')
  local generation = found[1]
  if not generation then return nil end
  for i = 2, 5 do
    if not is_count(found[i]) then return nil end
  end
  if redis.pcall('HGET', YOUNG, '') ~= generation or redis.pcall('HGET', OLD, '') ~= generation then return nil end
  return {
    generation = generation, young = tonumber(found[2]), old = tonumber(found[3]),
    slots = tonumber(found[4]), rotations = tonumber(found[5]), half = is_count(found[6]) and tonumber(found[6]),
  }
end

local function save(state)
  redis.call('HSET', META, 'young', math.max(state.young, 0), 'old', math.max(state.old, 0),
    'slots', state.slots, 'rotations', state.rotations)
end

-- Whether Redis has memory to spare. The first write of a script decides whether Redis lets the others through.
local function may_grow(state)
  return type(redis.pcall('HSET', META, 'generation', state.generation)) == 'number'
end

-- As `open`, but a missing or damaged index is replaced by an empty one. Either way it lives for another `ttl_ms`.
local function open_or_create(generation, ttl_ms)
  local state = open()
  if not state then
    redis.call('UNLINK', META, YOUNG, OLD)
    state = { generation = generation, young = 0, old = 0, slots = 0, rotations = 0 }
    redis.call('HSET', META, 'generation', generation)
    redis.call('HSET', YOUNG, '', generation)
    redis.call('HSET', OLD, '', generation)
    save(state)
  elseif not may_grow(state) then
    error('Redis is full: raise its maxmemory or lower max_block_replicas')
  end
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
  return state
end

local function parse_worker(record)
  local complete, epoch, sequence, seen_s = string.match(record or '', '^([01]) (%d+) (%d+) (%d+)$', SLOT_BYTES + 1)
  if not complete or #epoch ~= 20 then return nil end
  return {
    slot = struct.unpack('>I4', record), complete = complete == '1', epoch = epoch,
    sequence = tonumber(sequence), seen_s = tonumber(seen_s),
  }
end

local function get_worker(id)
  return parse_worker(redis.call('HGET', META, 'w:' .. id))
end

local function put_worker(id, worker)
  local record = string.format('%d %s %.0f %s',
    worker.complete and 1 or 0, worker.epoch, worker.sequence, redis.call('TIME')[1])
  redis.call('HSET', META, 'w:' .. id, pack_slot(worker.slot) .. record)
end

local function retire_slot(number)
  redis.call('HDEL', META, 's:' .. pack_slot(number))
end

local function forget_worker(id, worker)
  if worker and redis.call('HGET', META, 's:' .. pack_slot(worker.slot)) == id then retire_slot(worker.slot) end
  redis.call('HDEL', META, 'w:' .. id)
end

-- Whether a worker has reported recently. After the clock was set back a report may lie in the future.
local function is_heard(worker)
  return math.abs(tonumber(redis.call('TIME')[1]) - worker.seen_s) <= SILENT_S
end

-- The worker's record for this epoch: nil while a later epoch reports, a fresh record if the epoch is new.
local function current_worker(id, epoch)
  local worker = get_worker(id)
  if worker and epoch < worker.epoch and is_heard(worker) then return nil end
  if not worker or epoch ~= worker.epoch then
    forget_worker(id, worker)
    worker = { slot = 0, complete = false, epoch = epoch, sequence = 0 }
  end
  return worker
end

-- A function that tells whether a packed slot may still count, asking once for each.
local function new_liveness()
  local known = {}
  return function(slot)
    if known[slot] == nil then known[slot] = redis.call('HEXISTS', META, 's:' .. slot) == 1 end
    return known[slot]
  end
end

-- The keys of `count` blocks in a packed argument, whose entries are `stride` bytes apart, after the first `skipped`.
local function unpack_fields(packed, stride, skipped, count)
  local fields, cut, first = {}, string.sub, skipped * stride + 1
  for i = 1, count do
    fields[i] = cut(packed, first, first + KEY_BYTES - 1)
    first = first + stride
  end
  return fields
end

-- Holders of each field (false = none), and which of them are in the old generation.
local function read(state, fields)
  local values, is_old = redis.call('HMGET', YOUNG, unpack(fields)), {}
  if state.old <= 0 then return values, is_old end
  local missing, at = {}, {}
  for i = 1, #fields do
    if not values[i] then missing[#missing + 1], at[#at + 1] = fields[i], i end
  end
  if #missing == 0 then return values, is_old end
  local older = redis.call('HMGET', OLD, unpack(missing))
  for i = 1, #missing do
    if older[i] then values[at[i]], is_old[at[i]] = older[i], true end
  end
  return values, is_old
end

-- Holders as a list of packed slots; none when they are damaged.
local function slots_of(holders)
  local slots = {}
  if #holders % SLOT_BYTES ~= 0 or #holders > MAX_HOLDERS * SLOT_BYTES then return slots end
  for at = 1, #holders, SLOT_BYTES do slots[#slots + 1] = string.sub(holders, at, at + SLOT_BYTES - 1) end
  return slots
end

-- `holders` without slots that are over and without `own`, which is put last when `held`.
local function merge(holders, own, held, alive)
  local kept = {}
  for _, slot in ipairs(slots_of(holders)) do
    if slot ~= own and alive(slot) then kept[#kept + 1] = slot end
  end
  if held then kept[#kept + 1] = own end
  return table.concat(kept)
end

-- Write holders ('' = none) of fields whose holders `read` found to be `before`. Fields with holders become recent.
-- If the recent generation would count more than half of the bound, the old one is dropped and the recent one becomes
-- old. `half`: the limit until the first query.
local function write(state, half, fields, is_old, before, after)
  half = state.half or half
  local sets, young_drops, old_drops, rotated = {}, {}, {}, 0
  local function flush()
    if #sets > 0 then redis.call('HSET', YOUNG, unpack(sets)) end
    if #young_drops > 0 then redis.call('HDEL', YOUNG, unpack(young_drops)) end
    if #old_drops > 0 then redis.call('HDEL', OLD, unpack(old_drops)) end
    sets, young_drops, old_drops = {}, {}, {}
  end
  local function rotate()
    flush()
    redis.call('UNLINK', OLD)
    redis.call('RENAME', YOUNG, OLD)
    redis.call('HSET', YOUNG, '', state.generation)
    redis.call('PEXPIRE', YOUNG, math.max(redis.call('PTTL', OLD), 1000))
    state.old, state.young, state.rotations = state.young, 0, state.rotations + 1
    rotated = rotated + 1
  end
  for i = 1, #fields do
    local size, size_before = #after[i] / SLOT_BYTES, math.floor(#(before[i] or '') / SLOT_BYTES)
    local generation = before[i] and (is_old[i] and 2 or 1) + rotated  -- 1 recent, 2 old, more or false: in neither
    if size > 0 and state.young + size - (generation == 1 and size_before or 0) > half then
      rotate()
      generation = generation and generation + 1
    end
    if generation == 1 then state.young = state.young - size_before end
    if generation == 2 then
      state.old = state.old - size_before
      old_drops[#old_drops + 1] = fields[i]
    end
    if size > 0 then
      state.young = state.young + size
      sets[#sets + 1], sets[#sets + 2] = fields[i], after[i]
    elseif generation == 1 then
      young_drops[#young_drops + 1] = fields[i]
    end
    if #sets + #young_drops + #old_drops >= 1000 then flush() end
  end
  flush()
  save(state)
end

-- Add a slot to the holders of these blocks, or take it away.
local function change(state, half, packed, own, held)
  local count = #packed / KEY_BYTES
  if count == 0 then return end
  local fields = unpack_fields(packed, KEY_BYTES, 0, count)
  local before, is_old = read(state, fields)
  local alive, merged, after = new_liveness(), {}, {}
  for i = 1, count do
    local holders = before[i] or ''
    if not merged[holders] then merged[holders] = merge(holders, own, held, alive) end
    after[i] = merged[holders]
  end
  write(state, half, fields, is_old, before, after)
end

-- A function that collects the fields that `read` found in the old generation, each once, and its two lists: fields,
-- holders.
local function new_collector()
  local fields_of, holders_of, seen = {}, {}, {}
  local function collect(fields, values, is_old, count)
    for i = 1, count do
      if is_old[i] and not seen[fields[i]] then
        seen[fields[i]] = true
        fields_of[#fields_of + 1], holders_of[#holders_of + 1] = fields[i], values[i]
      end
    end
  end
  return collect, fields_of, holders_of
end

-- Whether blocks with these holders can become recent without the old generation being dropped.
local function has_room(state, half, holders)
  local size = 0
  for _, packed_slots in ipairs(holders) do size = size + #packed_slots / SLOT_BYTES end
  return state.young + size <= (state.half or half)
end

-- Move fields of the old generation, whose holders are `before`, to the recent one.
local function make_young(state, half, fields, before)
  if #fields == 0 or not may_grow(state) then return end
  local alive, merged, after, is_old = new_liveness(), {}, {}, {}
  for i, holders in ipairs(before) do
    if not merged[holders] then merged[holders] = merge(holders, nil, false, alive) end
    after[i], is_old[i] = merged[holders], true
  end
  write(state, half, fields, is_old, before, after)
end
