-- A snapshot is complete: make it visible. ARGV: new generation, worker id, slot, sequence, ttl in ms
local generation, id, slot, sequence, ttl_ms = unpack(ARGV)
open_or_create(generation, ttl_ms)
local worker = get_worker(id)
if not worker or worker.slot ~= tonumber(slot) then return 'resync' end
worker.complete, worker.sequence = true, tonumber(sequence)
put_worker(id, worker)
return 'applied'
