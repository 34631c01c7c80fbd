-- Start collecting a snapshot under a new slot, invisible until `commit`. Workers that have not reported for a
-- whole time to live are removed here.
-- ARGV: new generation, worker id, epoch, ttl in ms. Returns the slot, or "stale".
local generation, id, epoch, ttl_ms = unpack(ARGV)
local state = open_or_create(generation, ttl_ms)
local oldest_s = tonumber(redis.call('TIME')[1]) - tonumber(ttl_ms) / 1000
local entries = redis.call('HGETALL', META)
for i = 1, #entries, 2 do
  if string.sub(entries[i], 1, 2) == 'w:' then
    local other = parse_worker(entries[i + 1])
    if not other or other.seen_s < oldest_s then forget_worker(string.sub(entries[i], 3), other) end
  end
end
local worker = current_worker(id, epoch)
if not worker then return 'stale' end
retire_slot(worker.slot)
state.slots = state.slots + 1
worker.slot, worker.complete = state.slots, false
save(state)
redis.call('HSET', META, 's:' .. pack_slot(worker.slot), id)
put_worker(id, worker)
return worker.slot
