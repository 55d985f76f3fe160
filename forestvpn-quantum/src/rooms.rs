//! Rooms of the packet path one by one, for the benches (feature `rooms`). No part of the library's interface: it may
//! change or go at any time.

use core::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};

use crate::batch::Frame;
use crate::device::PeerId;
use crate::offload::checksum;
use crate::offload::split::Splitter;
use crate::replay::Window;
use crate::route::Routes;

/// The Internet checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> u16 {
    !checksum::sum(bytes, 0)
}

/// Cuts a super-packet into `out`, one segment behind the other; gives how many. 0: it is not well-formed, or `out` too
/// short.
pub fn split(mut frame: Frame<'_>, out: &mut [u8]) -> usize {
    let Ok(cut) = Splitter::new(&mut frame) else { return 0 };
    let stride = cut.len(0).max(1);
    let written = |(i, to): (usize, &mut [u8])| cut.write(i, to).is_some();
    out.chunks_mut(stride).take(cut.count()).enumerate().map(written).filter(|&done| done).count()
}

/// A replay window.
#[expect(missing_debug_implementations, reason = "for benches only")]
pub struct Replay(Window);

impl Replay {
    /// One that has seen nothing.
    #[expect(clippy::new_without_default, reason = "for benches only")]
    pub const fn new() -> Self {
        Self(Window::new())
    }

    /// What is done for one packet, before and after it is opened: whether it is new.
    pub fn take(&mut self, counter: u64) -> bool {
        self.0.check(counter) && self.0.accept(counter)
    }
}

/// A table of routes.
#[expect(missing_debug_implementations, reason = "for benches only")]
pub struct Table(Routes);

impl Table {
    /// With one address for each peer, numbered from 0.
    pub fn new(addresses: impl Iterator<Item = Ipv4Addr>) -> Self {
        let mut routes = Routes::new();
        for (peer, ip) in (0..).zip(addresses) {
            routes.insert(IpNet::V4(Ipv4Net::from(ip)), PeerId::from_raw(peer));
        }
        Self(routes)
    }

    /// The number of the peer that `ip` is routed to.
    pub fn lookup(&self, ip: Ipv4Addr) -> Option<u32> {
        self.0.lookup(ip.into()).map(PeerId::raw)
    }
}
