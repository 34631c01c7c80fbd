-- ARGV: worker id
if not open() then return 'applied' end
forget_worker(ARGV[1], get_worker(ARGV[1]))
return 'applied'
