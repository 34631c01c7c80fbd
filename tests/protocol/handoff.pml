/* The hand-off of one KV block: lease, read, confirm, pin, fence. Checked by test_handoff.py with Spin, exhaustively.
 *
 * One request wants one block of two words. It asks prefill worker 0, then worker 1, then worker 0 again. Time is
 * abstracted: a lease may end at any moment, a read may be given up at any moment, a call may fail at any moment. So
 * what is proven here does not depend on any setting of seconds. Not modelled: checksums (they guard against damaged
 * memory, which no lease protects from), more than one block, hosts whose clocks differ (no step compares clocks).
 *
 * Each WITHOUT_... or WITH_... takes one safeguard away. The test wants a counterexample for each: a safeguard whose
 * removal breaks nothing is not needed, or the model does not show what it is for.
 *
 *   here              in the code
 *   lease[s]          worker/leases.py    LeaseBook, and the engine's hold under the lease's name
 *   Transfer          transport/          one-sided read; cannot be cancelled, only waited for
 *   attempt           worker/remote_prefill.py _get_from, worker/fetch.py _read, worker/confirm.py
 *   holds             worker/transfer_hold.py  the hold on the reserved block until every read is over
 *   fence, freed      transport/base.py   KVTransport.close
 */
#define SOURCES  2
#define ATTEMPTS 3
#define NONE     0

#define OTHER 0 /* somebody else's bytes, or none yet */
#define KV    1 /* the bytes that the request wants   */

byte memory[4];          /* word w of source s's block is memory[2 * s + w] */
byte lease[SOURCES];     /* the lease that is valid there; its block is not reused meanwhile */
bool was_restarted;

byte block[2];           /* the reader's block */
byte holds = 1;           /* reads that may still write to it, plus one until no more will begin */
bool is_used;            /* the request reads it as its KV: it keeps the block itself */
bool is_taken;           /* another request of the reader has the block */
bool freed;              /* the reader's memory is gone */

byte num_writing;        /* reads that are not over */
bool done[ATTEMPTS + 1]; /* transfer t: every byte has arrived */
bool over[ATTEMPTS + 1]; /* transfer t: it will write no more */

#ifdef WITHOUT_HOLDS_UNDER_LEASES
#define MAY_REUSE(s) true
#else
#define MAY_REUSE(s) (lease[s] == NONE)
#endif

/* What a prefill worker does by itself, at any moment: end a lease, reuse a block that nobody leases, restart once. */
active [SOURCES] proctype Source() {
  byte s = _pid;
end:
  do
  :: atomic { lease[s] != NONE -> lease[s] = NONE }
  :: atomic { MAY_REUSE(s) && memory[2 * s] != OTHER -> memory[2 * s] = OTHER }
  :: atomic { MAY_REUSE(s) && memory[2 * s + 1] != OTHER -> memory[2 * s + 1] = OTHER }
  :: atomic { !was_restarted -> was_restarted = true; lease[s] = NONE; memory[2 * s] = OTHER; memory[2 * s + 1] = OTHER }
  od
}

/* A one-sided read, word by word. It may fail at any word; nobody can stop it. */
proctype Transfer(byte t, s) {
  byte w;
  do
  :: w < 2 ->
     atomic {
       assert(holds > 0 && !is_taken); /* no write to a block that belongs to something else */
       assert(!freed);                /* nor to memory that is gone */
       block[w] = memory[2 * s + w]; w++
     }
  :: w == 2 -> done[t] = true; break
  :: break
  od;
  atomic {
    over[t] = true; num_writing--;
#ifndef WITHOUT_TRANSFER_HOLDS
    holds--
#endif
  }
}

/* Attempt t to get the block, from source s under a lease of the same number. Sets `ok`. */
inline attempt(t, s) {
  ok = false;
  if
  :: atomic {                          /* the prefill worker computes, and grants what it computed */
       lease[s] == NONE -> memory[2 * s] = KV; memory[2 * s + 1] = KV; lease[s] = t
     };
     if
#ifndef WITHOUT_WAITING_FOR_FORMER_READS
     :: num_writing > 0 -> skip        /* an earlier read may still write: this attempt fails */
     :: num_writing == 0 -> read(t, s)
#else
     :: read(t, s)
#endif
     fi
  :: skip                              /* the call fails */
  fi
}

inline read(t, s) {
#ifdef WITHOUT_CONFIRMING_AFTER_THE_READ
  ok = (lease[s] == t);               /* asked before the read instead */
#endif
  atomic {
#ifndef WITHOUT_TRANSFER_HOLDS
    holds++;
#endif
    num_writing++; run Transfer(t, s)
  };
  if
  :: done[t] ->
#ifdef WITH_RENEWALS_THAT_REVIVE
     if
     :: lease[s] = t                  /* a renewal that comes late makes the ended lease valid again */
     :: skip
     fi;
#endif
#ifndef WITHOUT_CONFIRMING_AFTER_THE_READ
#ifdef WITHOUT_LEASES
     ok = true
#else
     ok = (lease[s] == t)             /* confirmed: valid all the while, since an ended lease never returns */
#endif
#endif
  :: over[t] && !done[t] -> ok = false /* it failed */
  :: ok = false                        /* given up at its deadline: it may go on writing */
  fi
}

active proctype Reader() {
  bool ok;
  attempt(1, 0);
  if
  :: !ok -> attempt(2, 1)
  :: else
  fi;
  if
  :: !ok -> attempt(3, 0)
  :: else
  fi;
#ifdef WITH_FALLBACK_INTO_THE_SAME_BLOCK
  if
  :: !ok -> block[0] = KV; block[1] = KV; ok = true
  :: else
  fi;
#endif
  atomic { is_used = ok; holds-- };     /* not ok: the prompt is computed, into other blocks */
  if
  :: is_used ->
#ifdef WITH_A_CLAIM_THAT_NOTHING_IS_USED
     assert(false);
#endif
     assert(block[0] == KV && block[1] == KV); /* right when it is confirmed */
     assert(block[0] == KV && block[1] == KV); /* and later: any step of any process may lie between */
     is_used = false
  :: else
  fi;
#ifndef WITHOUT_A_FENCE
  num_writing == 0;                    /* close: every read is over before the memory goes */
#endif
  freed = true
}

/* Another request of the reader takes the block once nothing holds it. */
active proctype Neighbour() {
  if
  :: atomic { holds == 0 && !is_used && !freed -> is_taken = true }
  :: freed
  fi
}

/* When nothing can happen any more, nothing is held. */
active proctype End() {
  timeout -> assert(holds == 0 && num_writing == 0 && lease[0] == NONE && lease[1] == NONE)
}
