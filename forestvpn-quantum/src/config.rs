//! Configuration and its read-back as plain data. The text forms (UAPI, wg-quick files) live in `fv`.

use core::net::SocketAddr;
use core::time::Duration;

use ipnet::IpNet;

use crate::key::{PresharedKey, PrivateKey, PublicKey};

/// One atomic change of a device. `None` leaves a field as it is.
#[derive(Clone, Debug, Default)]
pub struct DeviceUpdate {
    /// `Some(None)` removes the key (C-HS-10).
    pub private_key: Option<Option<PrivateKey>>,
    /// UDP port for IPv4 and IPv6; 0 lets the kernel choose a new one.
    pub listen_port: Option<u16>,
    /// SO_MARK of the UDP sockets; 0 is off (C-OUT-8).
    pub fwmark: Option<u32>,
    /// Remove every peer before `peers` is applied.
    pub replace_peers: bool,
    /// Changes of peers, applied in this order.
    pub peers: Vec<PeerUpdate>,
}

/// A change of one peer. `None` leaves a field as it is.
#[derive(Clone, Debug)]
pub struct PeerUpdate {
    /// Names the peer; it is created when absent, unless `update_only` or `remove` is set.
    pub public_key: PublicKey,
    /// Remove the peer; everything below is ignored.
    pub remove: bool,
    /// Do nothing when the peer does not exist.
    pub update_only: bool,
    /// `Some(None)` removes the preshared key; the next handshake uses the change (C-HS-8).
    pub preshared_key: Option<Option<PresharedKey>>,
    /// Where to send until the peer roams. IPv4-mapped IPv6 addresses are turned into IPv4.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between persistent keepalives, 0 = off (C-TMR-6).
    pub persistent_keepalive: Option<u16>,
    /// Remove all allowed IPs of the peer before `allowed_ips` is applied (C-AIP-3).
    pub replace_allowed_ips: bool,
    /// Prefixes to add or remove, in this order.
    pub allowed_ips: Vec<AllowedIp>,
}

impl PeerUpdate {
    /// An update that changes nothing yet: creates the peer when it is absent.
    pub const fn new(public_key: PublicKey) -> Self {
        Self {
            public_key,
            remove: false,
            update_only: false,
            preshared_key: None,
            endpoint: None,
            persistent_keepalive: None,
            replace_allowed_ips: false,
            allowed_ips: Vec::new(),
        }
    }
}

/// One allowed-IPs change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedIp {
    /// The prefix; host bits are masked away.
    pub net: IpNet,
    /// Take the prefix away (only if it is this peer's, C-AIP-2) instead of adding it.
    pub remove: bool,
}

/// Everything `wg show` wants to know about a device.
#[derive(Clone, Debug, Default)]
pub struct DeviceSnapshot {
    /// Absent when no key was set.
    pub private_key: Option<PrivateKey>,
    /// The port that the sockets really have; 0 while they are closed and none was chosen.
    pub listen_port: u16,
    /// SO_MARK, 0 = off.
    pub fwmark: u32,
    /// In order of creation.
    pub peers: Vec<PeerSnapshot>,
}

/// Everything `wg show` wants to know about a peer.
#[derive(Clone, Debug)]
pub struct PeerSnapshot {
    /// The peer's name.
    pub public_key: PublicKey,
    /// Absent when none is set.
    pub preshared_key: Option<PresharedKey>,
    /// Where the peer was last heard, or was configured to be.
    pub endpoint: Option<SocketAddr>,
    /// Wall clock time since the Unix epoch of the last completed handshake (C-SES-9).
    pub last_handshake: Option<Duration>,
    /// UDP payload bytes sent to the peer (C-OUT-6).
    pub tx_bytes: u64,
    /// UDP payload bytes received from the peer (C-IN-7).
    pub rx_bytes: u64,
    /// Seconds, 0 = off.
    pub persistent_keepalive: u16,
    /// In order of insertion (C-AIP-4).
    pub allowed_ips: Vec<IpNet>,
}
