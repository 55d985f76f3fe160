//! Packets that wait for a session: bounded in number and in bytes, oldest dropped first.

use std::collections::VecDeque;

/// Packets per peer (C-STG-1).
pub(crate) const MAX_PACKETS: usize = 128;
/// Bytes per peer (C-STG-2).
pub(crate) const MAX_BYTES: usize = 256 << 10;

/// One peer's waiting packets in order of arrival. An empty one stands for a keepalive.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    packets: VecDeque<Box<[u8]>>,
    bytes: usize,
}

impl Staging {
    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Appends a copy of `packet`, dropping the oldest until it fits this peer's bounds and `budget`, the
    /// bytes that all peers of the device may still add. Gives how many packets were dropped, which includes
    /// `packet` itself when it can never fit.
    pub(crate) fn push(&mut self, packet: &[u8], budget: usize) -> usize {
        //@ C-STG-1
        //@ C-STG-2
        let limit = MAX_BYTES.min(self.bytes.saturating_add(budget));
        if packet.len() > limit {
            return 1;
        }
        let mut dropped = 0;
        while self.packets.len() >= MAX_PACKETS || self.bytes + packet.len() > limit {
            if self.pop().is_none() {
                break;
            }
            dropped += 1;
        }
        self.bytes += packet.len();
        self.packets.push_back(packet.into());
        dropped
    }

    /// The oldest packet.
    pub(crate) fn front(&self) -> Option<&[u8]> {
        self.packets.front().map(AsRef::as_ref)
    }

    /// Takes the oldest packet; memory is given back with the last one.
    pub(crate) fn pop(&mut self) -> Option<Box<[u8]>> {
        let packet = self.packets.pop_front()?;
        self.bytes -= packet.len();
        if self.packets.is_empty() {
            self.packets = VecDeque::new();
        }
        Some(packet)
    }

    /// Drops everything; gives how many packets that were.
    pub(crate) fn clear(&mut self) -> usize {
        let dropped = self.packets.len();
        *self = Self::default();
        dropped
    }
}
