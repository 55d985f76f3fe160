//! The replay window of RFC 6479: which counters of a session were seen. Owned by the receiving half of a
//! session; asked once before decryption and changed once after it.

use crate::timers::REJECT_AFTER_MESSAGES;

const WORDS: usize = 128;
const WORD_BITS: u64 = u64::BITS as u64;
/// The word that the newest counter lies in is only partly used, so one word less than the whole ring counts.
const REACH: u64 = (WORDS as u64 - 1) * WORD_BITS;

/// 8192 bits as a ring of words; the effective window is 8128.
pub(crate) struct Window {
    /// The greatest counter accepted; 0 also when there is none yet.
    newest: u64,
    seen: [u64; WORDS],
}

impl Window {
    /// A window that has seen nothing: counter 0 is the first one to come.
    pub(crate) const fn new() -> Self {
        Self { newest: 0, seen: [0; WORDS] }
    }

    /// Whether [`accept`](Self::accept) would take `counter`. Changes nothing, so it may be asked about a
    /// packet that is not authenticated yet (C-RPL-2).
    pub(crate) fn check(&self, counter: u64) -> bool {
        //@ C-RPL-1
        //@ C-RPL-3
        if counter >= REJECT_AFTER_MESSAGES {
            return false;
        }
        if counter > self.newest {
            return true;
        }
        let (word, bit) = place(counter);
        !self.fell_out(counter) && self.seen.get(word).is_some_and(|w| w & bit == 0)
    }

    /// Is `counter` older than all that the window remembers?
    pub(crate) const fn fell_out(&self, counter: u64) -> bool {
        self.newest.saturating_sub(counter) > REACH
    }

    /// Takes `counter` if it is new, and remembers it. Only for packets that were authenticated (C-RPL-2).
    pub(crate) fn accept(&mut self, counter: u64) -> bool {
        //@ C-RPL-2
        if !self.check(counter) {
            return false;
        }
        if counter > self.newest {
            // Words between the old and the new top hold counters of the ring's previous round.
            let top = self.newest / WORD_BITS;
            let stale = (counter / WORD_BITS).saturating_sub(top).min(WORDS as u64);
            for step in 1..=stale {
                if let Some(w) = self.seen.get_mut((top.wrapping_add(step) % WORDS as u64) as usize) {
                    *w = 0;
                }
            }
            self.newest = counter;
        }
        let (word, bit) = place(counter);
        if let Some(w) = self.seen.get_mut(word) {
            *w |= bit;
        }
        true
    }
}

/// Index of the word and mask of the bit that stand for `counter`.
const fn place(counter: u64) -> (usize, u64) {
    ((counter / WORD_BITS % WORDS as u64) as usize, 1 << (counter % WORD_BITS))
}

#[cfg(test)]
#[path = "../tests/unit/replay.rs"]
mod tests;
