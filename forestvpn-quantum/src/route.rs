//! Allowed IPs: which peer a packet goes to, and which peer may have sent it. One table per device and
//! family; asked by the device once per packet, changed by configuration only.

use core::net::IpAddr;
use std::collections::BTreeMap;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::PrefixMap;

use crate::device::PeerId;

/// Whose a prefix is, and where it stands in that peer's list.
#[derive(Clone, Copy)]
struct Owner {
    peer: PeerId,
    place: u64,
}

/// Prefix to peer, longest match first, and back: each peer's prefixes in the order of insertion.
pub(crate) struct Routes {
    v4: PrefixMap<Ipv4Net, Owner>,
    v6: PrefixMap<Ipv6Net, Owner>,
    /// Keyed by peer and a number that only grows, so that a range of it is one peer's list.
    order: BTreeMap<(PeerId, u64), IpNet>,
    next: u64,
}

impl Routes {
    /// No prefix at all.
    pub(crate) fn new() -> Self {
        Self { v4: PrefixMap::new(), v6: PrefixMap::new(), order: BTreeMap::new(), next: 0 }
    }

    /// Gives `net`, host bits masked away, to `peer`, and puts it last in its list. A prefix that is there
    /// already moves; answers whose it was.
    pub(crate) fn insert(&mut self, net: IpNet, peer: PeerId) -> Option<PeerId> {
        //@ C-AIP-1
        //@ C-AIP-4
        let net = net.trunc();
        let owner = Owner { peer, place: self.next };
        self.next = self.next.saturating_add(1);
        let before = match net {
            IpNet::V4(net) => self.v4.insert(net, owner),
            IpNet::V6(net) => self.v6.insert(net, owner),
        };
        if let Some(before) = before {
            self.order.remove(&(before.peer, before.place));
        }
        self.order.insert((owner.peer, owner.place), net);
        before.map(|b| b.peer)
    }

    /// Takes exactly `net` away from `peer`; `false`, and nothing happens, when it is not this peer's.
    pub(crate) fn remove(&mut self, net: IpNet, peer: PeerId) -> bool {
        //@ C-AIP-2
        let net = net.trunc();
        let owner = match net {
            IpNet::V4(net) => self.v4.get(&net),
            IpNet::V6(net) => self.v6.get(&net),
        };
        let Some(owner) = owner.copied().filter(|o| o.peer == peer) else { return false };
        self.forget(net);
        self.order.remove(&(owner.peer, owner.place));
        true
    }

    /// Takes all prefixes of `peer` away.
    pub(crate) fn remove_peer(&mut self, peer: PeerId) {
        //@ C-AIP-3
        while let Some((&place, &net)) = self.order.range((peer, 0)..=(peer, u64::MAX)).next() {
            self.order.remove(&place);
            self.forget(net);
        }
    }

    /// The peer with the longest prefix that `ip` lies in.
    pub(crate) fn lookup(&self, ip: IpAddr) -> Option<PeerId> {
        let owner = match ip {
            IpAddr::V4(ip) => self.v4.get_lpm(&ip.into()).map(|(_, o)| o),
            IpAddr::V6(ip) => self.v6.get_lpm(&ip.into()).map(|(_, o)| o),
        };
        owner.map(|o| o.peer)
    }

    /// The prefixes of `peer` in the order of insertion.
    pub(crate) fn list(&self, peer: PeerId) -> impl Iterator<Item = IpNet> {
        self.order.range((peer, 0)..=(peer, u64::MAX)).map(|(_, net)| *net)
    }

    /// Takes `net` out of its table. An empty table is made anew: the crate keeps freed nodes for reuse.
    fn forget(&mut self, net: IpNet) {
        //@ C-AIP-2
        match net {
            IpNet::V4(net) => {
                self.v4.remove(&net);
                if self.v4.is_empty() {
                    self.v4 = PrefixMap::new();
                }
            }
            IpNet::V6(net) => {
                self.v6.remove(&net);
                if self.v6.is_empty() {
                    self.v6 = PrefixMap::new();
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/route.rs"]
mod tests;
