//! Decrypted packets on their way into the TUN device: joined where they follow each other, else one by one.
//!
//! The worker hands over the memory a batch was received in and where in it the packets lie.

use std::io::{self, IoSlice};

use crate::batch::Span;
use crate::event::GivenUp;
use crate::io::{TunQueue, device_gone};
use crate::offload::VnetHdr;
use crate::offload::coalesce::{Coalescer, MAX_PARTS};
use crate::unreachable::Unreachable;
use crate::worker::Fatal;

/// What became of the packets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WriteCounters {
    pub(crate) written: u64,
    /// Writes of several packets at once, and how many packets those were.
    pub(crate) merged_writes: u64,
    pub(crate) merged_packets: u64,
    /// Merged writes that the kernel refused; the packets were written singly.
    pub(crate) merge_fallbacks: u64,
    pub(crate) lost_down: u64,
    pub(crate) lost_refused: u64,
    /// Senders that were told that their packet has nowhere to go.
    pub(crate) unreachable: u64,
}

/// Plans the writes and makes them.
#[derive(Debug)]
pub(crate) struct Delivery {
    coalescer: Coalescer,
    /// Packets of one flow are joined; off for good once the kernel refused one.
    merging: bool,
    given_up: Option<GivenUp>,
    counters: WriteCounters,
}

impl Delivery {
    /// For batches of up to `spans` packets.
    pub(crate) fn new(spans: usize, merging: bool) -> Self {
        Self { coalescer: Coalescer::new(spans), merging, given_up: None, counters: WriteCounters::default() }
    }

    pub(crate) const fn set_merging(&mut self, on: bool) {
        self.merging = on;
    }

    /// Whether datagrams are joined, too.
    pub(crate) const fn set_merging_udp(&mut self, on: bool) {
        self.coalescer.set_udp(on);
    }

    pub(crate) const fn is_merging_udp(&self) -> bool {
        self.merging && self.coalescer.joins_udp()
    }

    pub(crate) const fn is_merging(&self) -> bool {
        self.merging
    }

    /// That a joined write was refused; said once.
    pub(crate) const fn poll_given_up(&mut self) -> Option<GivenUp> {
        self.given_up.take()
    }

    pub(crate) const fn counters(&self) -> WriteCounters {
        self.counters
    }

    /// Tells a sender on this side that its packet has nowhere to go.
    ///
    /// # Errors
    /// As [`Delivery::write`].
    #[cold]
    pub(crate) fn answer<T: TunQueue>(&mut self, tun: &mut T, answer: &Unreachable) -> Result<(), Fatal> {
        self.counters.unreachable += 1;
        self.counters.note(tun.send(&VnetHdr::default(), &[IoSlice::new(answer.as_bytes())]))
    }

    /// Writes the packets that lie in `bytes` at `spans`, in order within every flow.
    ///
    /// # Errors
    /// [`Fatal::TunGone`]; what else goes wrong is counted.
    pub(crate) fn write<T: TunQueue>(
        &mut self,
        tun: &mut T,
        bytes: &mut [u8],
        spans: &[Span],
    ) -> Result<(), Fatal> {
        if !self.merging || spans.len() < 2 {
            return spans.iter().try_for_each(|span| self.counters.one(tun, bytes, span));
        }
        let Self { coalescer, merging, given_up, counters } = self;
        for n in 0..coalescer.plan(bytes, spans) {
            let Some(write) = coalescer.write(n, bytes, spans) else { continue };
            if write.hdr == VnetHdr::default() {
                let mut members = coalescer.members(n).filter_map(|m| spans.get(m));
                members.try_for_each(|span| counters.one(tun, bytes, span))?;
                continue;
            }
            let mut parts = [IoSlice::new(&[]); MAX_PARTS];
            let mut used = 0;
            for (place, range) in parts.iter_mut().zip(coalescer.parts(&write, spans)) {
                *place = IoSlice::new(bytes.get(range).unwrap_or_default());
                used += 1;
            }
            match tun.send(&write.hdr, parts.get(..used).unwrap_or_default()) {
                Ok(()) => {
                    counters.merged_writes += 1;
                    counters.merged_packets += used as u64;
                    counters.written += used as u64;
                }
                Err(e) if device_gone(&e) => return Err(Fatal::TunGone),
                Err(e) if e.raw_os_error() == Some(libc::EIO) => counters.lost_down += used as u64,
                Err(e) => {
                    // Some kernels take the virtio header and refuse what it says: the same packets go singly,
                    // and nothing of the kind is joined any more.
                    counters.merge_fallbacks += 1;
                    let errno = e.raw_os_error().unwrap_or(0);
                    if write.hdr.gso_type == VnetHdr::GSO_UDP_L4 {
                        coalescer.set_udp(false);
                        *given_up = Some(GivenUp::JoinedDatagrams { errno });
                    } else {
                        *merging = false;
                        *given_up = Some(GivenUp::JoinedWrites { errno });
                    }
                    coalescer.split_up(&write, bytes, spans);
                    let mut members = coalescer.members(n).filter_map(|m| spans.get(m));
                    members.try_for_each(|span| counters.one(tun, bytes, span))?;
                }
            }
        }
        Ok(())
    }
}

impl WriteCounters {
    /// Takes note of what became of one packet.
    fn note(&mut self, written: io::Result<()>) -> Result<(), Fatal> {
        match written {
            Ok(()) => self.written += 1,
            Err(e) if device_gone(&e) => return Err(Fatal::TunGone),
            Err(e) if e.raw_os_error() == Some(libc::EIO) => self.lost_down += 1,
            Err(_) => self.lost_refused += 1,
        }
        Ok(())
    }

    /// Writes one packet, with the virtio header laid into the message header that is dead by now.
    fn one<T: TunQueue>(&mut self, tun: &mut T, bytes: &mut [u8], span: &Span) -> Result<(), Fatal> {
        let at = span.at as usize;
        let room = at.saturating_sub(VnetHdr::LEN)..at.saturating_add(span.len.into());
        let Some(room) = bytes.get_mut(room) else { return Ok(()) };
        self.note(tun.send_plain(room))
    }
}
