//! Which tricks may be used, and which this kernel is known to do badly. For `tun`, `udp` and the worker.

use std::fmt;
use std::str::FromStr;

/// Switches for everything that is only there to be fast. All on by default but `tun_udp_gro`; each is also given up by
/// itself when the kernel refuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offloads {
    /// TUN: super-packets and missing checksums from the kernel (TSO, USO, checksum offload).
    pub tun: bool,
    /// TUN: received TCP segments of one flow are written as one super-packet.
    pub tun_gro: bool,
    /// TUN: received UDP datagrams of one flow and size are, too. Off unless asked for: a program that reads them without
    /// `UDP_GRO` gains nothing, and forwarding depends on what the way out does with them.
    pub tun_udp_gro: bool,
    /// UDP: a train of datagrams goes out in one send (`UDP_SEGMENT`).
    pub udp_gso: bool,
    /// UDP: the kernel may hand over several datagrams as one (`UDP_GRO`).
    pub udp_gro: bool,
    /// Trains of packets go through the cipher together (AVX-512); for `DeviceConfig`.
    pub cipher: bool,
}

impl Default for Offloads {
    fn default() -> Self {
        Self { tun: true, tun_gro: true, tun_udp_gro: false, udp_gso: true, udp_gro: true, cipher: true }
    }
}

/// A name that is none of the switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownOffload {
    name: String,
    known: &'static str,
}

impl fmt::Display for UnknownOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, known } = self;
        write!(f, "\"{name}\" is no offload; known: {known}")
    }
}

impl std::error::Error for UnknownOffload {}

impl Offloads {
    /// Everything off: one packet per read and write on the TUN side, one datagram per message on the other.
    pub const NONE: Self = Self {
        tun: false,
        tun_gro: false,
        tun_udp_gro: false,
        udp_gso: false,
        udp_gro: false,
        cipher: false,
    };

    /// Switches on what a comma-separated list names and is off by default: `tun-udp-gro`.
    ///
    /// # Errors
    /// [`UnknownOffload`] for any other name.
    pub fn with(mut self, list: &str) -> Result<Self, UnknownOffload> {
        for name in list.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            match name {
                "tun-udp-gro" => self.tun_udp_gro = true,
                _ => return Err(UnknownOffload { name: name.to_owned(), known: "tun-udp-gro" }),
            }
        }
        Ok(self)
    }

    /// Switches off what a comma-separated list names: `tun`, `tun-gro`, `udp-gso`, `udp-gro`, `cipher`,
    /// `all`.
    ///
    /// # Errors
    /// [`UnknownOffload`] for any other name.
    pub fn without(mut self, list: &str) -> Result<Self, UnknownOffload> {
        for name in list.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            match name {
                "tun" => self.tun = false,
                "tun-gro" => self.tun_gro = false,
                "udp-gso" => self.udp_gso = false,
                "udp-gro" => self.udp_gro = false,
                "cipher" => self.cipher = false,
                "all" => self = Self::NONE,
                _ => {
                    return Err(UnknownOffload {
                        name: name.to_owned(),
                        known: "tun, tun-gro, udp-gso, udp-gro, cipher, all",
                    });
                }
            }
        }
        Ok(self)
    }
}

/// A Linux version, as far as faults of UDP offloads depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kernel(pub u32, pub u32, pub u32);

impl FromStr for Kernel {
    type Err = ();
    fn from_str(release: &str) -> Result<Self, ()> {
        // "7.1-5-generic" has no third number.
        let version =
            release.trim().split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap_or_default();
        let mut numbers = version.split('.').map(|n| n.parse().unwrap_or(0));
        let major = numbers.next().filter(|&n| n > 0).ok_or(())?;
        Ok(Self(major, numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)))
    }
}

impl Kernel {
    /// The running kernel; one that cannot be asked counts as old.
    pub fn running() -> Self {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        release.parse().unwrap_or(Self(4, 0, 0))
    }

    /// Most datagrams of one `UDP_SEGMENT` send; 1 = it is not to be used at all.
    pub fn gso_segments(self) -> usize {
        match self {
            // Equal-sized tails arrive corrupt: b10b446 until 78effd8 and 5f17ae0.
            _ if self >= Self(7, 0, 0) && self <= Self(7, 1, 4) => 1,
            _ if self < Self(4, 18, 0) => 1,
            // The header was counted in the limit until 158390e45612.
            _ if self < Self(5, 16, 0) => 63,
            _ => 64,
        }
    }

    /// `UDP_GRO` reorders with some drivers before 5.10, and can be asked for since 5.12 (98184612aca0).
    pub fn gro(self) -> bool {
        self >= Self(5, 12, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_with_known_faults_are_told_from_their_release() {
        let of = |release: &str| release.parse::<Kernel>().map(|k| (k.gso_segments(), k.gro()));
        assert_eq!(of("5.6.3"), Ok((63, false)));
        assert_eq!(of("5.11.0-49-generic"), Ok((63, false)));
        assert_eq!(of("5.15.0"), Ok((63, true)));
        assert_eq!(of("6.18.5\n"), Ok((64, true)));
        assert_eq!(of("7.0.0-rc1"), Ok((1, true)));
        assert_eq!(of("7.1.4"), Ok((1, true)));
        assert_eq!(of("7.1.5"), Ok((64, true)));
        assert_eq!(of("4.17.19"), Ok((1, false)));
        assert_eq!(of("7.1-5-generic"), Ok((1, true)));
        assert_eq!(of("6.1.0-13-amd64"), Ok((64, true)));
        assert_eq!((of("nonsense"), of("")), (Err(()), Err(())));
    }

    #[test]
    fn a_list_switches_off_what_it_names_and_nothing_else() {
        let on = Offloads::default();
        assert_eq!(on.without("tun, udp-gro"), Ok(Offloads { tun: false, udp_gro: false, ..on }));
        assert_eq!(on.without("all"), Ok(Offloads::NONE));
        assert_eq!(on.without(""), Ok(on));
        assert!(on.without("tso").unwrap_err().to_string().contains("\"tso\" is no offload; known: tun, "));
        assert!(!on.tun_udp_gro && on.with("tun-udp-gro").unwrap().tun_udp_gro);
        assert!(on.with("tun").unwrap_err().to_string().contains("known: tun-udp-gro"));
    }
}
