//! The picture most tests need: two hosts on one cable, an implementation on each, a tunnel between them.
//!
//! ```text
//!  ┌─ left ───────────────┐                      ┌─ right ──────────────┐
//!  │ tunnel 10.67.0.1     │   cable `wire`       │ tunnel 10.67.0.2     │
//!  │        fd67::1       │ 10.66.0.1  10.66.0.2 │        fd67::2       │
//!  │ port   51821         │   fd66::1  fd66::2   │ port   51822         │
//!  └──────────────────────┘                      └──────────────────────┘
//! ```

use crate::host::{Host, sh};
use crate::node::{Keys, Node, Program};

pub(crate) const LEFT4: &str = "10.67.0.1";
pub(crate) const LEFT6: &str = "fd67::1";
pub(crate) const RIGHT4: &str = "10.67.0.2";
pub(crate) const RIGHT6: &str = "fd67::2";

/// The IP version outside the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outer {
    V4,
    V6,
}

/// One end. The node goes before its host when dropped.
pub(crate) struct End {
    pub(crate) node: Node,
    pub(crate) keys: Keys,
    pub(crate) host: Host,
}

pub(crate) struct Pair {
    pub(crate) left: End,
    pub(crate) right: End,
    pub(crate) psk: String,
}

impl Pair {
    /// Both ends started, with keys, ports, a preshared key and each other as peers, over IPv4, links up.
    /// No packet has been sent yet: no end has a persistent keepalive.
    #[track_caller]
    pub(crate) fn new(left: Program, right: Program) -> Self {
        Self::over(left, right, Outer::V4)
    }

    #[track_caller]
    pub(crate) fn over(left: Program, right: Program, outer: Outer) -> Self {
        let pair = Self::unconfigured(left, right);
        pair.configure_over(outer);
        pair
    }

    /// What `new` does once both ends are started.
    #[track_caller]
    pub(crate) fn configure(&self) {
        self.configure_over(Outer::V4);
    }

    #[track_caller]
    fn configure_over(&self, outer: Outer) {
        let (l, r) = (&self.left, &self.right);
        l.node.wg(&format!("set listen-port 51821 private-key <(echo {})", l.keys.private));
        r.node.wg(&format!("set listen-port 51822 private-key <(echo {})", r.keys.private));
        self.introduce(l, self.endpoint_of_right(outer));
        self.introduce(r, self.endpoint_of_left(outer));
        for (end, v4, v6) in [(l, LEFT4, LEFT6), (r, RIGHT4, RIGHT6)] {
            end.link_up(v4, v6, 1420);
        }
    }

    /// Both ends started and the cable laid, nothing configured and no link up.
    #[track_caller]
    pub(crate) fn unconfigured(left: Program, right: Program) -> Self {
        let end = |program, label: &str| {
            let host = Host::new(label);
            End { node: Node::start(program, &host), keys: Keys::generate(), host }
        };
        let pair = Self { left: end(left, "left"), right: end(right, "right"), psk: sh("wg genpsk") };
        pair.left.host.cable(
            "wire",
            &["10.66.0.1/24", "fd66::1/64"],
            &pair.right.host,
            &["10.66.0.2/24", "fd66::2/64"],
        );
        pair
    }

    #[expect(clippy::unused_self, reason = "reads as a property of the pair")]
    pub(crate) const fn endpoint_of_left(&self, outer: Outer) -> &'static str {
        match outer {
            Outer::V4 => "10.66.0.1:51821",
            Outer::V6 => "[fd66::1]:51821",
        }
    }

    #[expect(clippy::unused_self, reason = "reads as a property of the pair")]
    pub(crate) const fn endpoint_of_right(&self, outer: Outer) -> &'static str {
        match outer {
            Outer::V4 => "10.66.0.2:51822",
            Outer::V6 => "[fd66::2]:51822",
        }
    }

    /// Tells `to` about the other end, at `endpoint` if one is given.
    #[track_caller]
    pub(crate) fn introduce(&self, to: &End, endpoint: &str) {
        let (other, ips) = if std::ptr::eq(to, &raw const self.left) {
            (&self.right, format!("{RIGHT4}/32,{RIGHT6}/128"))
        } else {
            (&self.left, format!("{LEFT4}/32,{LEFT6}/128"))
        };
        let endpoint = if endpoint.is_empty() { String::new() } else { format!("endpoint {endpoint}") };
        to.node.wg(&format!(
            "set peer {} preshared-key <(echo {}) {endpoint} allowed-ips {ips}",
            other.keys.public, self.psk
        ));
    }

    /// The peer of `left`: its public key.
    pub(crate) fn right_key(&self) -> &str {
        &self.right.keys.public
    }

    pub(crate) fn left_key(&self) -> &str {
        &self.left.keys.public
    }

    /// Pings through the tunnel both ways, IPv4 and IPv6 inside.
    #[track_caller]
    pub(crate) fn ping_all(&self, count: u32) {
        self.left.host.ping(RIGHT4, count);
        self.right.host.ping(LEFT4, count);
        self.left.host.ping(RIGHT6, count);
        self.right.host.ping(LEFT6, count);
    }
}

impl End {
    /// Addresses (with a /24 and a /64 on link), MTU, and the link up.
    #[track_caller]
    pub(crate) fn link_up(&self, v4: &str, v6: &str, mtu: u32) {
        let name = &self.node.name;
        self.host.address(name, &format!("{v4}/24"));
        self.host.ip(&format!("link set {name} mtu {mtu} up"));
        self.host.address(name, &format!("{v6}/64"));
    }
}
