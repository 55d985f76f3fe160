//! What the kernel promises about a packet that crosses a TUN device with `IFF_VNET_HDR`.

pub(crate) mod checksum;
pub mod coalesce;
pub(crate) mod split;

/// `struct virtio_net_hdr`: ten bytes before each packet, native endian (`linux/virtio_net.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHdr {
    /// [`VnetHdr::NEEDS_CSUM`] and friends.
    pub flags: u8,
    /// One of the `GSO_` constants.
    pub gso_type: u8,
    /// Header length; a hint that cannot be trusted on read.
    pub hdr_len: u16,
    /// Payload bytes per segment.
    pub gso_size: u16,
    /// Where the checksum starts, from the first byte of the packet.
    pub csum_start: u16,
    /// Where it is stored, from `csum_start`.
    pub csum_offset: u16,
}

impl VnetHdr {
    /// Length on the wire between us and the kernel.
    pub const LEN: usize = 10;
    /// `flags`: the checksum at `csum_start + csum_offset` holds only the pseudo-header sum.
    pub const NEEDS_CSUM: u8 = 1;
    /// `gso_type`: a plain packet.
    pub const GSO_NONE: u8 = 0;
    /// `gso_type`: TCP over IPv4.
    pub const GSO_TCPV4: u8 = 1;
    /// `gso_type`: TCP over IPv6.
    pub const GSO_TCPV6: u8 = 4;
    /// `gso_type`: UDP, both families (USO).
    pub const GSO_UDP_L4: u8 = 5;
    /// `gso_type` flag: ECN (CWR) present.
    pub const GSO_ECN: u8 = 0x80;

    /// Reads the header from its ten bytes.
    pub const fn from_bytes(b: &[u8; Self::LEN]) -> Self {
        Self {
            flags: b[0],
            gso_type: b[1],
            hdr_len: u16::from_ne_bytes([b[2], b[3]]),
            gso_size: u16::from_ne_bytes([b[4], b[5]]),
            csum_start: u16::from_ne_bytes([b[6], b[7]]),
            csum_offset: u16::from_ne_bytes([b[8], b[9]]),
        }
    }

    /// The ten bytes of this header.
    pub const fn to_bytes(self) -> [u8; Self::LEN] {
        let (h, g) = (self.hdr_len.to_ne_bytes(), self.gso_size.to_ne_bytes());
        let (s, o) = (self.csum_start.to_ne_bytes(), self.csum_offset.to_ne_bytes());
        [self.flags, self.gso_type, h[0], h[1], g[0], g[1], s[0], s[1], o[0], o[1]]
    }
}
