-- Returns workers, blocks, block replicas, rotations
local state = open()
if not state then return { 0, 0, 0, 0 } end
local num_workers, entries = 0, redis.call('HGETALL', META)
for i = 1, #entries, 2 do
  local worker = string.sub(entries[i], 1, 2) == 'w:' and parse_worker(entries[i + 1])
  if worker and worker.complete then num_workers = num_workers + 1 end
end
local num_blocks = redis.call('HLEN', YOUNG) + redis.call('HLEN', OLD) - 2
return { num_workers, num_blocks, state.young + state.old, state.rotations }
