-- After how many blocks of a chain, at most so many as it holds, each worker holds constant states. Reads the chain from
-- its end. ARGV: packed keys of the states after each block, half of the bound, then id and number of blocks of each
-- worker. Returns the counts as JSON, without workers that have none.
local MOST_READ = 512
local packed, half = ARGV[1], tonumber(ARGV[2])
local state = open()
local waiting, num_waiting, found, position = {}, 0, {}, 0
for i = 3, state and #ARGV or 0, 2 do
  local worker, most = get_worker(ARGV[i]), tonumber(ARGV[i + 1])
  if worker and worker.complete then
    waiting[pack_slot(worker.slot)] = { id = ARGV[i], most = most }
    num_waiting, position = num_waiting + 1, math.max(position, most)
  end
end
local collect, old_fields, old_holders = new_collector()
while num_waiting > 0 and position > 0 do
  local first = math.max(0, position - MOST_READ)
  local fields = unpack_fields(packed, KEY_BYTES, first, position - first)
  local values, is_old = read(state, fields)
  if state.old > 0 then collect(fields, values, is_old, #fields) end
  for i = #fields, 1, -1 do
    for _, slot in ipairs(slots_of(values[i] or '')) do
      local asked = waiting[slot]
      if asked and asked.most >= first + i then
        found[asked.id], waiting[slot] = first + i, nil
        num_waiting = num_waiting - 1
      end
    end
  end
  position = first
end
if state and has_room(state, half, old_holders) then make_young(state, half, old_fields, old_holders) end
return cjson.encode(found)
