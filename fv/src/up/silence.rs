//! Peers that do not answer: told by their counters, so that a name can be looked up again and a port be changed, and
//! never while a session is healthy. Called by `up`.

use std::time::Duration;

/// How often the counters are looked at: more than a handshake's pause, so that one that goes unanswered is seen in
/// each look.
pub(crate) const LOOK: Duration = Duration::from_secs(6);

/// Looks in a row in which something was sent and nothing came. What is sent in a healthy session is answered within
/// ten seconds; only keepalives are not, and those do not count.
const FIRST: u32 = 4;
/// With what was tried in vain, that becomes twice as many, up to about five minutes.
const MOST: u32 = 48;

/// Bytes of a keepalive.
const KEEPALIVE: u64 = 32;

/// What is known of one peer.
#[derive(Debug)]
pub(crate) struct Silence {
    received: u64,
    sent: u64,
    unanswered: u32,
    patience: u32,
}

impl Default for Silence {
    fn default() -> Self {
        Self { received: 0, sent: 0, unanswered: 0, patience: FIRST }
    }
}

impl Silence {
    /// The next look at the bytes received from the peer and sent to it, whose keepalives are `keepalive` seconds apart
    /// (0: there are none). True: it is time to try something.
    pub(crate) fn look(&mut self, received: u64, sent: u64, keepalive: u16) -> bool {
        let answered = received != self.received;
        // Bytes that could not be sent are taken back from the count.
        let more = sent.saturating_sub(self.sent);
        let keepalives = LOOK.as_secs().checked_div(keepalive.into()).map_or(0, |count| count + 2);
        let said = more > 0 && !(more.is_multiple_of(KEEPALIVE) && more / KEEPALIVE <= keepalives);
        (self.received, self.sent) = (received, sent);
        if answered {
            *self = Self { received, sent, ..Self::default() };
            return false;
        }
        self.unanswered = if said { self.unanswered + 1 } else { 0 };
        if self.unanswered < self.patience {
            return false;
        }
        self.unanswered = 0;
        self.patience = (self.patience * 2).min(MOST);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After which looks something is tried, of bytes received and sent in each.
    fn tried(keepalive: u16, looks: impl IntoIterator<Item = (u64, u64)>) -> Vec<usize> {
        let (mut silence, mut received, mut sent) = (Silence::default(), 0, 0);
        let each = looks.into_iter().enumerate().filter(|(_, (rx, tx))| {
            (received, sent) = (received + rx, sent + tx);
            silence.look(received, sent, keepalive)
        });
        each.map(|(n, _)| n + 1).collect()
    }

    #[test]
    fn f88_a_peer_that_is_called_in_vain_is_told_after_four_looks_and_then_ever_more_rarely() {
        assert_eq!(tried(25, [(0, 148); 400]), [4, 12, 28, 60, 108, 156, 204, 252, 300, 348, 396]);
    }

    #[test]
    fn f88_nothing_is_tried_while_the_session_is_healthy_or_nobody_says_anything() {
        // Data, answered by a keepalive in every second look.
        assert!(tried(25, (0..100).map(|n| (32 * (n % 2), 1000))).is_empty());
        // Keepalives, answered by nothing but a handshake every two minutes.
        let handshake = |n: u64| if n.is_multiple_of(20) { 92 } else { 0 };
        for (seconds, bytes) in [(25, [32, 0, 0, 0]), (1, [192, 192, 224, 192])] {
            let looks = (0..100).map(|n: u64| (handshake(n), bytes[n as usize % 4]));
            assert!(tried(seconds, looks).is_empty(), "{seconds}");
        }
        assert!(tried(0, [(0, 0); 100]).is_empty());
    }

    #[test]
    fn an_answer_makes_it_patient_as_in_the_beginning() {
        let dead = [(0, 148); 4];
        assert_eq!(tried(0, dead.into_iter().chain([(92, 0)]).chain(dead)), [4, 9]);
    }
}
