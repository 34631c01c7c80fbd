-- Add blocks to a snapshot. ARGV: new generation, worker id, slot, packed keys, ttl in ms, half of the bound
local generation, id, slot, packed, ttl_ms, half = unpack(ARGV)
local state = open_or_create(generation, ttl_ms)
local worker = get_worker(id)
if not worker or worker.slot ~= tonumber(slot) then return 'resync' end
change(state, tonumber(half), packed, pack_slot(worker.slot), true)
return 'applied'
