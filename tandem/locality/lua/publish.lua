-- ARGV: new generation, worker id, epoch, sequence, "1" when this is the last part of the report,
--       packed stored keys, packed removed keys, ttl in ms, half of the bound
local generation, id, epoch, sequence, last, stored, removed, ttl_ms, half = unpack(ARGV)
local state = open_or_create(generation, ttl_ms)
local worker = current_worker(id, epoch)
if not worker then return 'stale' end
local own, number = pack_slot(worker.slot), tonumber(sequence)
local is_known = worker.complete and redis.call('HGET', META, 's:' .. own) == id
local is_gap = not is_known or number > worker.sequence + 1
if not is_gap and number == worker.sequence + 1 then
  change(state, tonumber(half), stored, own, true)
  change(state, tonumber(half), removed, own, false)
  if last == '1' then worker.sequence = number end
end
put_worker(id, worker)
return is_gap and 'resync' or 'applied'
