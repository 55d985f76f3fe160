//! What the device has to tell: events that are polled, and reasons why a packet was not let through.

use std::net::SocketAddr;

use crate::device::PeerId;

/// Something the owner of a device may want to act on; see [`Device::poll_event`](crate::Device::poll_event).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A handshake completed; data can flow both ways.
    SessionEstablished(PeerId),
    /// Twenty initiations stayed without an answer; queued packets were dropped (C-TMR-1).
    HandshakeFailed(PeerId),
    /// The peer was heard at a new address (C-IN-1).
    EndpointChanged(PeerId),
    /// All keys of the peer were wiped, 540 s after the last handshake (C-SES-7).
    SessionExpired(PeerId),
    /// The kernel refused a trick that is only there to be fast; nothing was lost. From the worker, once each.
    OffloadGivenUp(GivenUp),
}

/// A trick that is done without from now on, and the number of the error that the kernel gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GivenUp {
    /// `UDP_SEGMENT`, until the sockets are opened anew.
    Segmentation {
        /// `EIO`: the way out has no checksum offload.
        errno: i32,
    },
    /// `UDP_SEGMENT` towards one address, until the sockets are opened anew.
    SegmentationTowards {
        /// The address.
        remote: SocketAddr,
        /// `EINVAL` or `EMSGSIZE`: a datagram does not fit the path.
        errno: i32,
    },
    /// Joined writes of UDP datagrams to the TUN device, for good.
    JoinedDatagrams {
        /// What the kernel said.
        errno: i32,
    },
    /// Joined writes to the TUN device, for good.
    JoinedWrites {
        /// `EINVAL` from kernels that misread the virtio header.
        errno: i32,
    },
}

/// Why a packet was not let through. Not an error: a counter, see [`Device::discards`](crate::Device::discards).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Discard {
    /// From the network: unknown type, wrong length, or non-zero reserved bytes (C-FMT).
    Malformed,
    /// From the network: mac1 is not for our public key (C-MAC-1).
    BadMac1,
    /// From the network: receiver index belongs to no session or handshake.
    UnknownIndex,
    /// From the network: the tag does not verify, or a handshake message does not decrypt.
    BadTag,
    /// From the network: the counter was seen before or is too old (C-RPL-1).
    Replayed,
    /// From the network: the session is too old or used up (C-SES-6).
    KeyExpired,
    /// From the network: initiation from a static key that is no peer of ours.
    UnknownPeer,
    /// From the network: initiation with an old timestamp (C-HS-3).
    OldTimestamp,
    /// From the network: initiations of one peer less than 20 ms apart (C-HS-5).
    TooFrequent,
    /// From the network: a cookie reply nobody waits for, or that does not decrypt (C-CK-3).
    BadCookie,
    /// From the network: under load and without a valid mac2; a cookie reply was sent instead.
    CookieSent,
    /// From the network: under load, and the source's token bucket is empty (C-LOAD-2).
    UnderLoad,
    /// From the network: the handshake queue is full (C-LOAD-3).
    QueueFull,
    /// Inside: neither IPv4 nor IPv6, or lengths that do not fit.
    NotIp,
    /// Inside, inbound: the source address is routed to another peer or none (C-IN-4).
    Spoofed,
    /// Inside, outbound: no peer has the destination in its allowed IPs.
    NoRoute,
    /// Outbound: the peer has no endpoint yet (C-STG-4).
    NoEndpoint,
    /// Outbound: the oldest of too many packets waiting for a handshake (C-STG-1).
    StagingFull,
    /// Outbound: waiting packets given up after a failed handshake, removal or shutdown.
    GivenUp,
    /// Outbound: the send arena had no room.
    NoRoom,
    /// Outbound: our private key is not set, or a Diffie-Hellman result is zero (C-PRIM-4).
    NoKey,
    /// Either way: the interface is down.
    Down,
    /// Outbound: our own message to this peer, routed back into the tunnel it came out of.
    Looped,
    /// From TUN: a super-packet whose description contradicts itself.
    BadOffload,
}

impl Discard {
    /// How many reasons there are.
    pub const COUNT: usize = Self::BadOffload as usize + 1;

    /// Every reason with the name it is counted under.
    pub const ALL: [(Self, &'static str); Self::COUNT] = [
        (Self::Malformed, "malformed"),
        (Self::BadMac1, "bad_mac1"),
        (Self::UnknownIndex, "unknown_index"),
        (Self::BadTag, "bad_tag"),
        (Self::Replayed, "replayed"),
        (Self::KeyExpired, "key_expired"),
        (Self::UnknownPeer, "unknown_peer"),
        (Self::OldTimestamp, "old_timestamp"),
        (Self::TooFrequent, "too_frequent"),
        (Self::BadCookie, "bad_cookie"),
        (Self::CookieSent, "cookie_sent"),
        (Self::UnderLoad, "under_load"),
        (Self::QueueFull, "queue_full"),
        (Self::NotIp, "not_ip"),
        (Self::Spoofed, "spoofed"),
        (Self::NoRoute, "no_route"),
        (Self::NoEndpoint, "no_endpoint"),
        (Self::StagingFull, "staging_full"),
        (Self::GivenUp, "given_up"),
        (Self::NoRoom, "no_room"),
        (Self::NoKey, "no_key"),
        (Self::Down, "down"),
        (Self::Looped, "looped"),
        (Self::BadOffload, "bad_offload"),
    ];
}
